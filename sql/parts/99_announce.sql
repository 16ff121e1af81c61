-- 99_announce: the last statement.  The workers find the database when this commits.

SELECT outbox.announce();
