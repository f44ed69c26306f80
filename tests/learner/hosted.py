"""A run of the hosted kind whose service is a real engine behind a gateway."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.config import Config, EngineSettings
from engine import launch
from store.log import Log, open_log
from tests.learner.gateway import Gateway, gateway_to
from tests.learner.process import Learner
from tests.learner.support import CHAINS, Reward, Worker, any_reward, make_config, open_event, until, working


class Place(NamedTuple):
    """A run of the hosted kind whose service is an engine behind a gateway."""

    gateway: Gateway
    log: Log
    config: Config
    env: dict[str, str]

    def learner(self, steps: int) -> Learner:
        """Start a learner."""
        return Learner(self.log.run_dir, self.config, steps, env=self.env)

    def committed(self, steps: int) -> None:
        """Wait until so many steps are committed."""
        until(lambda: self.log.state().committed_steps >= steps, f"{steps} committed steps")


@contextlib.contextmanager
def place(
    tmp_path: Path,
    engine_dir: Path,
    patience: float = 30,
    *,
    groups: int = 0,
    reward: Reward = any_reward,
    **learner: object,
) -> Iterator[Place]:
    """Open a new run with a worker beside, or with `groups` groups; `patience` is the SDK's, in seconds."""
    hosted = EngineSettings(kind="pytrio", base_model="rolltape/tiny", lora_rank=4, request_timeout=patience)
    config = msgspec.structs.replace(make_config(**({"save_every": 100} | learner)), engine=hosted)
    address = launch.status(engine_dir).address
    assert address is not None
    with (
        gateway_to(address) as gateway,
        open_log(tmp_path / "run", create=True, role="rollout") as log,
    ):
        log.open_run(open_event(config))
        worker = Worker(log, config, CHAINS, reward)
        for _ in range(groups):
            worker.step()
        env = {
            "HOME": str(tmp_path),
            "PYTRIO_BASE_URL": gateway.url,
            "PYTRIO_API_KEY": address.token,
            "NO_PROXY": "127.0.0.1",
        }
        with contextlib.nullcontext() if groups else working(worker):
            yield Place(gateway, log, config, env)
