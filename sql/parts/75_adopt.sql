-- 75_adopt: copied data.  src/adopt.c

CREATE FUNCTION outbox.adopt()
RETURNS boolean
AS 'MODULE_PATHNAME', 'outbox_adopt'
LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION outbox.adopt()
    IS 'deliver data from here that was copied from another cluster or database; false where it was not';
