"""Synthetic tasks for the nano Clover: drone-dispatch parsing, tool calls, joint decisions, echo.

Every task is a pair (prompt, answer) of plain text. The answers are machine-checkable (JSON or a verbatim
copy), so exact match is a meaningful score.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

HELD_OUT_SEED = 99991  # evaluation only; packing.batches refuses it

SITES = [
    "Alder",
    "Birch",
    "Cedar",
    "Dover",
    "Elm",
    "Fjord",
    "Grove",
    "Heath",
    "Iris",
    "Juniper",
    "Kelp",
    "Larch",
    "Maple",
    "Noble",
    "Oak",
    "Pine",
    "Quartz",
    "Ridge",
    "Sage",
    "Thorn",
]
TASKS = ["survey", "medical", "delivery", "patrol", "relay", "search"]
PRIORITIES = ["low", "normal", "high", "urgent"]
NAMES = [
    "Ana",
    "Ben",
    "Chen",
    "Dara",
    "Eli",
    "Fay",
    "Gus",
    "Hana",
    "Ivo",
    "Jin",
    "Kai",
    "Lea",
    "Mo",
    "Nia",
    "Omar",
    "Pia",
    "Raj",
    "Sol",
    "Tao",
    "Uma",
]
CITIES = ["Lyon", "Oslo", "Kyoto", "Lima", "Quito", "Turin", "Accra", "Perth", "Delhi", "Malmo", "Porto", "Basel"]
ORDER_KINDS = ["lift", "waypoint", "assign", "radius", "dispatch"]

Order = dict[str, str | int]
Task = Callable[[Random], tuple[str, str]]


def dispatch_order(kind: str, r: Random) -> tuple[str, Order]:
    """One order as an English sentence and as the JSON object it stands for."""
    uav, site = r.randint(1, 40), r.choice(SITES)
    if kind == "lift":
        at = f"{r.randint(0, 23):02d}:{r.choice([0, 15, 30, 45]):02d}"
        sentences = [
            f"The no-fly zone at {site} is lifted at {at}.",
            f"From {at} the {site} no-fly zone is cleared.",
            f"No-fly restriction over {site} ends {at}.",
        ]
        return r.choice(sentences), {"op": "lift_nofly", "zone": site, "at": at}
    if kind == "waypoint":
        index, x, y = r.randint(1, 9), r.randint(0, 999), r.randint(0, 999)
        sentences = [
            f"UAV{uav}: move waypoint {index} to {x},{y}.",
            f"Waypoint {index} of UAV{uav} is now {x},{y}.",
            f"Change UAV{uav} waypoint {index} to position {x},{y}.",
        ]
        return r.choice(sentences), {"op": "set_waypoint", "uav": uav, "index": index, "x": x, "y": y}
    if kind == "assign":
        task = r.choice(TASKS)
        sentences = [
            f"UAV{uav} takes the {task} task at {site}.",
            f"Assign {task} at {site} to UAV{uav}.",
            f"At {site}, UAV{uav} does {task}.",
        ]
        return r.choice(sentences), {"op": "assign", "uav": uav, "task": task, "site": site}
    if kind == "radius":
        metres = r.randint(1, 40) * 50
        sentences = [
            f"Set the search radius of UAV{uav} to {metres} m.",
            f"UAV{uav} search radius {metres} metres.",
            f"Widen UAV{uav} to a radius of {metres} m.",
        ]
        return r.choice(sentences), {"op": "set_radius", "uav": uav, "metres": metres}
    priority = r.choice(PRIORITIES)
    sentences = [
        f"Send UAV{uav} to {site}, priority {priority}.",
        f"Dispatch UAV{uav} at once to {site} ({priority}).",
        f"{priority.capitalize()}: UAV{uav} goes to {site}.",
    ]
    return r.choice(sentences), {"op": "dispatch", "uav": uav, "site": site, "priority": priority}


def dispatch(r: Random) -> tuple[str, str]:
    """One to five orders of distinct kinds, to be parsed into a JSON list in the order of the text."""
    kinds = r.sample(ORDER_KINDS, r.choice([1, 1, 2, 2, 3, 4, 5]))
    pairs = [dispatch_order(kind, r) for kind in kinds]
    text = " ".join(sentence for sentence, _ in pairs)
    return f"Parse the dispatch: {text}", json.dumps([order for _, order in pairs])


def tool(r: Random) -> tuple[str, str]:
    """A request to be answered by one tool call."""
    name, city, other = r.choice(NAMES), r.choice(CITIES), r.choice(CITIES)
    date = f"2026-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"
    kind = r.randrange(4)
    arguments: dict[str, object]
    if kind == 0:
        seats = r.randint(1, 6)
        requests = [
            f"Book {seats} seats from {city} to {other} on {date} for {name}.",
            f"{name} needs {seats} seats {city} to {other}, {date}.",
        ]
        function = "book_trip"
        arguments = {"passenger": name, "from": city, "to": other, "date": date, "seats": seats}
    elif kind == 1:
        requests = [f"What is the weather in {city} on {date}?", f"Weather for {city}, {date} please."]
        function, arguments = "get_weather", {"city": city, "date": date}
    elif kind == 2:
        visibility = r.choice(["private", "public"])
        requests = [
            f"Create a {visibility} project {other} and invite {name}.",
            f"New {visibility} project named {other}; add {name} as a member.",
        ]
        function = "create_project"
        arguments = {"name": other, "visibility": visibility, "members": [name]}
    else:
        time = f"{r.randint(8, 18):02d}:{r.choice([0, 15, 30, 45]):02d}"
        requests = [
            f"Remind {name} at {time} on {date} to call {city}.",
            f"Set a reminder for {name}: call {city}, {date} {time}.",
        ]
        function = "set_reminder"
        arguments = {"who": name, "date": date, "time": time, "text": f"call {city}"}
    call = json.dumps({"name": function, "arguments": arguments})
    return r.choice(requests), f"<tool_call>\n{call}\n</tool_call>"


def decide(r: Random) -> tuple[str, str]:
    """Four answers that depend on one another: the refund follows from the other three."""
    name, site = r.choice(NAMES), r.choice(SITES)
    days, limit = r.randint(1, 30), r.choice([5, 7, 10, 14, 21])
    deposit, damaged = r.randint(1, 20) * 50, r.random() < 0.5
    in_time = days <= limit
    keep = damaged or not in_time
    document = (
        f"{name} left {site} and gave notice {days} days late. Notice may be at most {limit} days late. "
        f"The deposit is {deposit}. The room was {'damaged' if damaged else 'clean'}."
    )
    answer = {
        "notice_in_time": in_time,
        "room_damaged": damaged,
        "keep_deposit": keep,
        "refund": 0 if keep else deposit,
    }
    return f"Decide together: notice_in_time, room_damaged, keep_deposit, refund. {document}", json.dumps(answer)


def echo(r: Random) -> tuple[str, str]:
    """A random word list to be repeated: teaches copying, from which the other tasks profit. Training only."""
    pool = SITES + NAMES + CITIES + TASKS

    def word() -> str:
        forms = [
            r.choice(pool),
            str(r.randint(0, 999)),
            f"UAV{r.randint(1, 40)}",
            f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}",
        ]
        return r.choice(forms)

    text = " ".join(word() for _ in range(r.randint(3, 24)))
    return f"Repeat: {text}", text


TASKS_BY_NAME: dict[str, Task] = {"dispatch": dispatch, "tool": tool, "decide": decide}
DEFAULT_SHARES = {"dispatch": 0.55, "tool": 0.25, "decide": 0.2}


def sample(r: Random, shares: dict[str, float] = DEFAULT_SHARES) -> tuple[str, str]:
    """Draws one (prompt, answer) of a random task."""
    name = r.choices(list(shares), list(shares.values()))[0]
    return TASKS_BY_NAME[name](r)


def held_out(task: str, count: int) -> list[tuple[str, str]]:
    """The first `count` held-out examples of one task, always the same ones."""
    r = Random(HELD_OUT_SEED)
    generate = TASKS_BY_NAME[task]
    return [generate(r) for _ in range(count)]


def render_prompt(prompt: str) -> str:
    """The chat template's text for one user turn and the start of the assistant's."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
