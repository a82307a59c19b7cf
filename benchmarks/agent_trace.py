"""Synthetic trace of an agent that answers support tickets with tool calls. Deterministic, without a model.

Each ticket is a series of requests. The answer to a request is a tool call in JSON; the next prompt adds the result.
Tickets of the same kind repeat the same calls with different arguments, as agents do.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SYSTEM = (
    "You are the support agent of a web shop. Answer each ticket with calls of these tools, one JSON object at a time: "
    "get_order(order_id), get_customer(customer_id), search_products(query, filters), create_refund(order_id, items, "
    "reason), update_order(order_id, changes), send_message(customer_id, subject, body), close_ticket(ticket, summary)."
)
PRODUCTS = ("desk lamp", "steel kettle", "office chair", "rain jacket", "hiking boots", "wireless mouse", "yoga mat")
NAMES = ("Ada Park", "Ben Ortiz", "Chloe Weber", "Dinesh Rao", "Elena Rossi", "Femi Okafor", "Grace Lin", "Hugo Silva")
CITIES = ("Lyon", "Porto", "Leeds", "Graz", "Turin", "Ghent", "Malmo")
COMPLAINTS = ("arrived broken", "is the wrong colour", "never arrived", "stopped working after a week", "is too small")
GREETINGS = ("Thank you for your message.", "Thanks for getting in touch.", "We are sorry for the trouble.")

Value = Any
Step = tuple[Value, Value]
"""A tool call and its result."""


@dataclass(frozen=True)
class Ticket:
    """A customer's order and complaint."""

    number: int
    order: str
    customer: str
    name: str
    city: str
    product: str
    price: float
    complaint: str
    greeting: str


def agent_texts(tickets: int, seed: int = 0) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the first prompt of each ticket, with pairs of a tool call and the text up to the next call."""
    random_ = random.Random(seed)
    for number in range(tickets):
        ticket = _ticket(4000 + number, random_)
        steps = random_.choice((_refund, _replacement, _question))(ticket, random_)
        request = f"Ticket {ticket.number} from {ticket.name}: the {ticket.product} of order {ticket.order} "
        yield (
            f"{SYSTEM}\n\nUser: {request}{ticket.complaint}.\n\nAssistant: ",
            [(_json(call), f"\n\nResult: {_json(result)}\n\nAssistant: ") for call, result in steps],
        )


def _ticket(number: int, random_: random.Random) -> Ticket:
    choose: Callable[[tuple[str, ...]], str] = random_.choice
    order, customer = f"A-{random_.randrange(10**5, 10**6)}", f"c{random_.randrange(1000, 10_000)}"
    price = random_.randrange(900, 20_000) / 100
    return Ticket(
        number, order, customer, choose(NAMES), choose(CITIES), choose(PRODUCTS), price, choose(COMPLAINTS),
        choose(GREETINGS),
    )  # fmt: skip


def _json(value: Value) -> str:
    return json.dumps(value, indent=1)


def _call(tool: str, **arguments: Value) -> Value:
    return {"tool": tool, "arguments": arguments}


def _order(ticket: Ticket, status: str) -> Value:
    items = [{"product": ticket.product, "quantity": 1, "price": ticket.price, "currency": "EUR"}]
    return {"order_id": ticket.order, "customer_id": ticket.customer, "status": status, "items": items}


def _look_up(ticket: Ticket, random_: random.Random) -> list[Step]:
    address = {"street": f"{random_.randrange(1, 200)} Mill Road", "city": ticket.city}
    customer = {"customer_id": ticket.customer, "name": ticket.name, "address": address, "orders": [ticket.order]}
    steps = [
        (_call("get_order", order_id=ticket.order), _order(ticket, "delivered")),
        (_call("get_customer", customer_id=ticket.customer), customer),
    ]
    return steps if random_.random() < 0.7 else steps[:1]


def _close(ticket: Ticket, body: str, summary: str) -> list[Step]:
    body = f"Dear {ticket.name},\n\n{ticket.greeting} {body}\n\nKind regards,\nYour support team"
    subject = f"Your order {ticket.order}"
    message = _call("send_message", customer_id=ticket.customer, subject=subject, body=body)
    closed = _call("close_ticket", ticket=ticket.number, summary=summary)
    return [(message, {"sent": True}), (closed, {"ticket": ticket.number, "status": "closed"})]


def _refund(ticket: Ticket, random_: random.Random) -> list[Step]:
    items = [{"product": ticket.product, "quantity": 1, "amount": ticket.price, "currency": "EUR"}]
    refund = _call(
        "create_refund", order_id=ticket.order, items=items, reason=f"The {ticket.product} {ticket.complaint}."
    )
    body = f"We have refunded {ticket.price} EUR for the {ticket.product}. The money will arrive within five days."
    steps = [(refund, {"refund_id": f"r{random_.randrange(10_000)}", "amount": ticket.price, "status": "approved"})]
    summary = f"Refunded {ticket.price} EUR because the {ticket.product} {ticket.complaint}."
    return [*_look_up(ticket, random_), *steps, *_close(ticket, body, summary)]


def _replacement(ticket: Ticket, random_: random.Random) -> list[Step]:
    filters = {"in_stock": True, "max_price": ticket.price, "currency": "EUR"}
    found = [{"product": ticket.product, "sku": f"S{random_.randrange(10_000)}", "stock": random_.randrange(1, 90)}]
    search = (_call("search_products", query=ticket.product, filters=filters), {"products": found})
    added = [{"action": "add", "sku": found[0]["sku"], "quantity": 1, "price": 0}]
    change = (_call("update_order", order_id=ticket.order, changes=added), _order(ticket, "processing"))
    body = f"A new {ticket.product} is on its way to {ticket.city}. You do not need to return the old one."
    summary = f"Sent a new {ticket.product} because the first one {ticket.complaint}."
    return [*_look_up(ticket, random_), search, change, *_close(ticket, body, summary)]


def _question(ticket: Ticket, random_: random.Random) -> list[Step]:
    days = random_.randrange(2, 30)
    body = f"Your order was shipped to {ticket.city} {days} days ago. Please send us a photo of the {ticket.product}."
    return [*_look_up(ticket, random_), *_close(ticket, body, f"Asked for a photo of the {ticket.product}.")]
