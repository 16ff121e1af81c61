-- 51_access: who may do what; src/access.c, which has the table of what each kind includes.

CREATE FUNCTION outbox.grant_access(
    role name,
    kind text,
    subscription text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_grant_access';
COMMENT ON FUNCTION outbox.grant_access(name, text, text) IS
    'lets a role act as producer, consumer (of one subscription, or of all), operator or reader; returns whether that is a change';

CREATE FUNCTION outbox.revoke_access(
    role name,
    kind text,
    subscription text DEFAULT NULL)
RETURNS boolean
LANGUAGE C VOLATILE PARALLEL UNSAFE
AS 'MODULE_PATHNAME', 'outbox_revoke_access';
COMMENT ON FUNCTION outbox.revoke_access(name, text, text) IS
    'takes back what grant_access() gave, except what the role also has as another kind; returns whether that is a change';

CREATE TRIGGER guard_role BEFORE INSERT OR UPDATE OR DELETE ON outbox.access
    FOR EACH ROW EXECUTE FUNCTION outbox.guard_role();
ALTER TABLE outbox.access ENABLE ALWAYS TRIGGER guard_role;
