-- 90_privileges: nothing for PUBLIC, nor for whom default privileges give something, or who
-- had been granted something on the schema before: who can create in it could put functions
-- beside ours.  outbox.grant_access() gives what a role needs.

REVOKE ALL ON ALL ROUTINES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA outbox FROM PUBLIC;
REVOKE ALL ON SCHEMA outbox FROM PUBLIC;

DO $$
DECLARE
    object record;
BEGIN
    FOR object IN
        SELECT 'TABLE ' OPERATOR(pg_catalog.||) pg_catalog.format('outbox.%I', c.relname) AS name, a.grantee
          FROM pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a
         WHERE c.relnamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace
           AND c.relkind OPERATOR(pg_catalog.=) ANY (ARRAY['r', 'v', 'S']::pg_catalog."char"[])
           AND a.grantee OPERATOR(pg_catalog.<>) c.relowner
        UNION
        SELECT 'ROUTINE ' OPERATOR(pg_catalog.||) p.oid::pg_catalog.regprocedure::pg_catalog.text, a.grantee
          FROM pg_catalog.pg_proc p, pg_catalog.aclexplode(p.proacl) a
         WHERE p.pronamespace OPERATOR(pg_catalog.=) 'outbox'::pg_catalog.regnamespace
           AND a.grantee OPERATOR(pg_catalog.<>) p.proowner
        UNION
        SELECT 'SCHEMA outbox', a.grantee
          FROM pg_catalog.pg_namespace n, pg_catalog.aclexplode(n.nspacl) a
         WHERE n.nspname OPERATOR(pg_catalog.=) 'outbox'
           AND a.grantee OPERATOR(pg_catalog.<>) n.nspowner
    LOOP
        EXECUTE pg_catalog.format('REVOKE ALL ON %s FROM %s CASCADE', object.name,
            CASE object.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(object.grantee)) END);
    END LOOP;
END
$$;
