"""Records which experts the nano model's blocks touch, step by step, as a trace for benchmarks/residency.py.

python benchmarks/record_routing.py nano-routing.jsonl --prompts 100
python benchmarks/residency.py --trace nano-routing.jsonl --capacity 32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from clover import Clover
from clover.engines.build import BuildRequest, build_target
from clover.engines.residency_simulator import Trace, write_trace
from clover.engines.trace.routing import open_routing_session
from clover.runtime.decoder import StepEvent
from clover.runtime.loop import StepTimes, decode

NANO = Path(__file__).resolve().parent.parent / "examples" / "nano"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("out", type=Path)
    a.add_argument("--prompts", type=int, default=100, help="held-out dispatch messages")
    args = a.parse_args()
    sys.path.insert(0, str(NANO))
    import data

    with tempfile.TemporaryDirectory() as folder:
        build_target(BuildRequest(NANO, Path(folder) / "nano", precision="int4"))
        with Clover.load(Path(folder) / "nano", max_context=1024) as engine:
            assert engine.tokenizer is not None and engine.template is not None
            session = open_routing_session(engine.bundle, max_context=1024)
            blocks: list[int] = []
            done = 0
            for prompt, _ in data.held_out("dispatch", args.prompts):
                rendered = engine.template.render([{"role": "user", "content": prompt}])
                decoder = engine.decoder(engine.tokenizer.encode_prompt(rendered), engine.options(mode="fill"))
                session.reset(0)
                events = decode(session, decoder, 0, StepTimes())
                blocks += [done + e.block for e in events if isinstance(e, StepEvent)]
                done = blocks[-1]
            config = engine.bundle.manifest.config
            trace = Trace(config.num_hidden_layers, config.num_experts, tuple(session.masks), tuple(blocks))
    write_trace(args.out, trace)
    print(f"{args.out}: {len(blocks)} steps of {done} blocks")


if __name__ == "__main__":
    main()
