-- The mended hook: a gift card has no price for one.

create or replace function shop.project_order(message outbox.message) returns void
language plpgsql as $$
declare
    content jsonb := message.payload;
begin
    if message.name = 'shop.order.placed' then
        insert into shop.customer as c (customer, orders, ordered, highest_price)
        values (content ->> 'customer', 1, (content ->> 'amount')::numeric,
                coalesce((content ->> 'amount')::numeric / nullif((content ->> 'quantity')::integer, 0), 0))
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
