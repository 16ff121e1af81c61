-- The order service of the demo: its tables, and the functions that its transactions call.
-- What is new here are the calls of outbox.enqueue(): they are part of the transaction.

create schema shop;

create table shop.stock (
    item     text primary key,
    price    numeric(10, 2) not null,
    quantity integer not null check (quantity >= 0)
);

create table shop.orders (
    id       bigint generated always as identity primary key,
    customer text not null,
    item     text not null references shop.stock,
    quantity integer not null,
    amount   numeric(10, 2) not null,
    paid_at  timestamptz
);

insert into shop.stock values
    ('teapot', 24.50, 10000), ('saucer', 3.20, 10000), ('samovar', 310.00, 3), ('gift card', 25.00, 10000);

-- The demo's own bookkeeping, to compare with at the end: which messages were committed,
-- and which have arrived where, how often.
create table shop.sent (
    id   uuid primary key,
    name text not null
);

create table shop.received (
    subscription text    not null,
    id           uuid    not null,
    times        integer not null default 1,
    primary key (subscription, id)
);

create function shop.note_received(to_subscription text, message_id uuid) returns void
begin atomic
    insert into shop.received as r (subscription, id) values (to_subscription, message_id)
        on conflict (subscription, id) do update set times = r.times + 1;
end;

-- Enqueues first and takes the stock last: where there is none, the constraint refuses it,
-- and neither the order nor its message has ever been there.
create function shop.place_order(customer text, item text, quantity integer) returns bigint
language plpgsql as $$
declare
    placed shop.orders;
    message_id uuid;
begin
    insert into shop.orders (customer, item, quantity, amount)
    select place_order.customer, s.item, place_order.quantity, s.price * greatest(place_order.quantity, 1)
      from shop.stock s where s.item = place_order.item
    returning * into placed;

    message_id := outbox.enqueue('shop.order.placed',
        jsonb_build_object('order', placed.id, 'customer', placed.customer, 'item', placed.item,
                           'quantity', placed.quantity, 'amount', placed.amount),
        aggregate_type => 'order', aggregate_id => placed.id::text);
    insert into shop.sent values (message_id, 'shop.order.placed');

    update shop.stock s set quantity = s.quantity - place_order.quantity where s.item = place_order.item;
    return placed.id;
end
$$;

create function shop.pay_order(order_id bigint) returns void
language plpgsql as $$
declare
    paid shop.orders;
    message_id uuid;
begin
    update shop.orders set paid_at = now() where id = order_id and paid_at is null returning * into strict paid;

    -- A key of the caller's choice: a second message of this name with the same key is not made.
    message_id := outbox.enqueue('shop.order.paid',
        jsonb_build_object('order', paid.id, 'customer', paid.customer, 'amount', paid.amount),
        aggregate_type => 'order', aggregate_id => paid.id::text, dedupe_key => paid.id::text);
    insert into shop.sent values (message_id, 'shop.order.paid');
end
$$;

-- What comes from outside is passed on under the name it came with.
create function shop.receive_event(name text, payload jsonb) returns void
language plpgsql as $$
begin
    insert into shop.sent
    select outbox.enqueue(receive_event.name, receive_event.payload, headers => '{"source": "webhook"}'),
           receive_event.name;
end
$$;
