-- Who gets the messages.  A subscription is an independent consumer: it has its own
-- progress, its own retries and its own dead letters.

-- 1. 'projection' is pushed: the server calls functions.  What a function writes commits
--    together with the settlement of its message, so it happens exactly once.

create table shop.customer (
    customer      text primary key,
    orders        integer not null default 0,
    ordered       numeric(12, 2) not null default 0,
    paid          numeric(12, 2) not null default 0,
    highest_price numeric(12, 2) not null default 0
);

-- It divides by the quantity, which is 0 for a gift card: one message will be poison.
create function shop.project_order(message outbox.message) returns void
language plpgsql as $$
declare
    content jsonb := message.payload;
begin
    if message.name = 'shop.order.placed' then
        insert into shop.customer as c (customer, orders, ordered, highest_price)
        values (content ->> 'customer', 1, (content ->> 'amount')::numeric,
                (content ->> 'amount')::numeric / (content ->> 'quantity')::integer)
        on conflict (customer) do update
            set orders = c.orders + 1, ordered = c.ordered + excluded.ordered,
                highest_price = greatest(c.highest_price, excluded.highest_price);
    elsif message.name = 'shop.order.paid' then
        insert into shop.customer as c (customer, paid)
        values (content ->> 'customer', (content ->> 'amount')::numeric)
        on conflict (customer) do update set paid = c.paid + excluded.paid;
    end if;
    perform shop.note_received(message.subscription, message.id);
end
$$;

create table shop.activity (
    name  text primary key,
    count integer not null,
    bytes bigint not null
);

create function shop.project_activity(message outbox.message) returns void
language plpgsql as $$
begin
    insert into shop.activity as a (name, count, bytes)
    values (message.name, 1, length(message.payload::text))
    on conflict (name) do update set count = a.count + 1, bytes = a.bytes + excluded.bytes;
    perform shop.note_received(message.subscription, message.id);
end
$$;

select outbox.subscribe('projection');
-- The longer pattern wins: orders go to the first function, everything else to the second.
-- A failed message is tried again after 50, then after 100 ms; after the third attempt it is a dead letter.
select outbox.register_hook('shop.order.*', 'shop.project_order', subscription => 'projection',
                            max_attempts => 3, retry => '{50 ms, 100 ms}');
select outbox.register_hook('#', 'shop.project_activity', subscription => 'projection');

-- 2. 'notify' is pushed too, by NOTIFY.  Whoever can connect can LISTEN, so the payload is sent
--    along only where this says so.  Above PostgreSQL's limit of 8000 bytes it stays
--    behind, and the listener fetches it by its id.
select outbox.subscribe('notify');
select outbox.register_notify('#', 'shop_events', subscription => 'notify', include_data => true);

-- 3. 'archive' is pulled, by worker.py: its work is outside of the database.
select outbox.subscribe('archive', lease => '2 seconds');

-- 4. The subscription that is there from the start has no consumer here, and would keep everything for it.
select outbox.unsubscribe('default', discard_pending => true);
