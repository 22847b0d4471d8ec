"""ReAct: the model thinks, calls a tool, reads what came back, and goes on until it calls finish.

Every action is typed: it names one of the tools, with arguments that fit the tool's signature. Two worked examples show
the form; they are the same for all questions, so they are computed once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from common import command_line, console, run, show_calls, start

import sglite as sgl

FACTS = {
    "uranus": "Uranus is the seventh planet from the sun. It has 28 moons.",
    "mars": "Mars is the fourth planet from the sun. It has 2 moons, Phobos and Deimos.",
    "neptune": "Neptune is the eighth planet from the sun. It has 16 moons.",
    "earth": "The Earth is the third planet from the sun. It has 1 moon.",
}
QUESTIONS = (
    "How many moons does Neptune have?",
    "How many moons does Mars have?",
)


def lookup(name: str) -> str:
    return FACTS.get(name.strip().lower(), f"There is nothing about {name}. Known are: {', '.join(FACTS)}.")


def add(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


def finish(answer: str) -> str:
    return answer


TOOLS = [lookup, add, finish]


def action(tool: str, **arguments: object) -> str:
    return json.dumps({"name": tool, "arguments": arguments})


EXAMPLES = f"""Answer the question step by step. Each step is a thought, an action and an observation.

Question: How many moons do Jupiter and Eris have together?
Thought: I look up Jupiter.
Action: {action("lookup", name="Jupiter")}
Observation: Jupiter is the largest planet. It has 97 moons.
Thought: I look up Eris.
Action: {action("lookup", name="Eris")}
Observation: Eris is a dwarf planet. It has 1 moon.
Thought: I add 97 and 1.
Action: {action("add", a=97, b=1)}
Observation: 97 + 1 = 98
Thought: The answer is 98.
Action: {action("finish", answer="98")}

Question: How many moons does Saturn have?
Thought: I look up Saturn.
Action: {action("lookup", name="Saturn")}
Observation: Saturn is the sixth planet from the sun. It has 274 moons.
Thought: The answer is 274.
Action: {action("finish", answer="274")}

"""


@sgl.function
def react(s: sgl.ProgramState, question: str, steps: int = 6) -> str | None:
    """What ``finish`` was called with; None where the steps ran out before."""
    s += EXAMPLES + f"Question: {question}"
    for step in range(steps):
        s += "\nThought:" + sgl.gen(f"thought{step}", max_tokens=24, stop=["\n"], temperature=0)
        s += "\nAction: " + sgl.tool_call(f"action{step}", TOOLS, max_tokens=60, temperature=0)
        call = s.value(f"action{step}")
        result = call.call()
        if call.function is finish:
            return str(result)
        s += f"\nObservation: {result}"
    return None


def show(question: str, state: sgl.ProgramState) -> None:
    console.print(f"[bold]{question}[/bold]")
    console.print(state.text().removeprefix(EXAMPLES).partition("\n")[2], style="dim", markup=False, highlight=False)
    result = state.ret_value
    console.print(f"  answer: [bold]{result}[/bold]\n" if result is not None else "  no answer in time\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("question", nargs="*", help="questions about planets (default: two of them)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="most steps per question (default: 6)")
    options = start(parser, arguments)
    questions = options.question or QUESTIONS
    states = react.run_batch([{"question": question, "steps": options.steps} for question in questions])
    for question, state in zip(questions, states, strict=True):
        show(question, state)
    show_calls(states)


if __name__ == "__main__":
    run(main)
