-- The hooks of the model check, and what they leave.
--
-- A hook says that it has begun by an empty file, which no rollback and no crash of the server undoes: its name says
-- which message, which attempt, and what it has planned.  Only then it acts.  What it did is a row in model.effect.
-- If the file "armed" is there and "fired" is not, whoever finds it first kills his own process, or all of the server
-- at once: the attempt must be charged all the same.  One shell does it, with what it has built in: a few milliseconds
-- later somebody else has flushed what this process has not.  The postmaster is stopped first and killed last: no process
-- of his is missed, and none sees him die and ends in good order.

CREATE TABLE model.mood (       -- one row: where files go, how calls may end, how many enqueue something
    folder text, plans text[], followed float8);

CREATE TABLE model.effect (     -- without a key, so that what happens twice is there twice
    subscription text, id uuid, attempt integer, pid integer, at bigint, by bigint, followed uuid,
    worker boolean DEFAULT current_setting('application_name') <> 'outbox_model');

CREATE FUNCTION model.begun(m outbox.message, folder text, plan text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    -- the number of the event that called deliver(); 0: a worker, or drain()
    caller text := coalesce(nullif(current_setting('model.by', true), ''), '0');
BEGIN
    EXECUTE format('COPY (SELECT) TO %L', folder || '/' || concat_ws('~', m.subscription, m.id, m.attempts,
        m.max_attempts, pg_backend_pid(), model.us(clock_timestamp()), model.us(outbox.clock()), plan, caller));
    IF (pg_stat_file(folder || '/armed', true)).size IS NOT NULL THEN
        EXECUTE format('COPY (SELECT) TO PROGRAM %L', format(
            'trap "" INT TERM; read -r what <%1$s/armed || exit; set -C; : >%1$s/fired || exit; '
            '[ $what = all ] || { kill -9 $PPID; exit; }; read -r main <postmaster.pid; kill -STOP $main; '
            'read -r others </proc/$main/task/$main/children; kill -9 $others $main',
            folder));
        PERFORM pg_sleep(5);    -- on purpose: to be there when it comes
    END IF;
EXCEPTION WHEN external_routine_exception THEN
    NULL;                       -- somebody else was first
END $$;

CREATE FUNCTION model.hook(m outbox.message) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    mood model.mood;
    plan text;
    followed uuid;
BEGIN
    SELECT * INTO STRICT mood FROM model.mood;
    plan := mood.plans[1 + floor(random() * cardinality(mood.plans))];
    PERFORM model.begun(m, mood.folder, plan);
    IF random() < mood.followed THEN
        followed := outbox.enqueue('done', jsonb_build_object('of', m.id, 'in', m.subscription));
    END IF;
    INSERT INTO model.effect VALUES (m.subscription, m.id, m.attempts, pg_backend_pid(), model.us(clock_timestamp()),
        coalesce(nullif(current_setting('model.by', true), ''), '0')::bigint, followed);
    IF random() < 0.1 THEN      -- held open on purpose
        PERFORM pg_sleep(random() * 0.1);
    END IF;
    CASE plan
        WHEN 'failed' THEN
            RAISE 'planned';
        WHEN 'dead' THEN
            RAISE 'planned' USING ERRCODE = 'OB010';
        WHEN 'later' THEN
            RAISE 'planned' USING ERRCODE = 'OB011', DETAIL = format('%s ms', (random() * 2000)::integer);
        WHEN 'slow' THEN        -- on purpose beyond its time limit, if it has one
            PERFORM pg_sleep(2.5);
        WHEN 'stuck' THEN       -- beyond twice that, whatever it is told
            FOR i IN 1..3 LOOP
                BEGIN
                    PERFORM pg_sleep(2.5);
                EXCEPTION WHEN query_canceled THEN
                    NULL;
                END;
            END LOOP;
        ELSE
            NULL;
    END CASE;
END $$;

CREATE FUNCTION model.other_hook(m outbox.message) RETURNS void LANGUAGE sql AS 'SELECT model.hook(m)';
