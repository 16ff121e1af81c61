-- Is everything there?  The messages that the service committed, against what the status says was
-- delivered, against what has really arrived.

\set ON_ERROR_STOP on

create temporary table result as
select s.subscription,
       (select count(*) from shop.sent) as committed,
       s.delivered,
       s.pending + s.dead + s.ready + s.scheduled + s.leased + s.unhandled as open,
       (select count(*) from shop.received r where r.subscription = s.subscription) as arrived,
       (select count(*) from shop.received r where r.subscription = s.subscription and r.times > 1) as twice,
       (select count(*) from shop.sent m
         where not exists (select from shop.received r where r.subscription = s.subscription and r.id = m.id)) as lost,
       (select count(*) from shop.received r
         where r.subscription = s.subscription and not exists (select from shop.sent m where m.id = r.id)) as unknown
  from outbox.status s;

table result order by subscription;

-- A projection agrees with what it is a projection of.
select 'orders' as what, count(*) as orders, sum(amount) as ordered,
       sum(amount) filter (where paid_at is not null) as paid
  from shop.orders
union all
select 'their projection', sum(orders), sum(ordered), sum(paid) from shop.customer;

-- An error ends psql, and with it the demo.
do $$
declare
    bad text;
begin
    select string_agg(subscription, ', ') into bad from result
     where committed = 0 or delivered <> committed or arrived <> committed or open <> 0 or lost <> 0 or unknown <> 0
        or (twice <> 0 and subscription = 'projection');
    if bad is not null or (select count(*) from result) <> 3 then
        raise exception 'the count is wrong: %', coalesce(bad, 'a subscription is missing');
    end if;
    if (select (sum(orders), sum(ordered), sum(paid)) from shop.customer)
       is distinct from
       (select (count(*), sum(amount), sum(amount) filter (where paid_at is not null)) from shop.orders) then
        raise exception 'the projection differs from the orders';
    end if;
end
$$;
