"""The order in which steps are launched and read."""

from typing import Any

from app.engine.core import EngineCore
from app.engine.schedule.batch import Batch


class Log:
    """Launches and reads of steps in order, like ("launch", 3), ("read", 2); and the batches."""

    def __init__(self, core: EngineCore) -> None:
        self.events: list[tuple[str, int]] = []
        self.batches: list[Batch] = []
        launch = core.launch

        def launched(batch: Batch) -> Any:
            number = len(self.batches)
            self.batches.append(batch)
            self.events.append(("launch", number))
            pending = launch(batch)
            read = pending.read

            def noted() -> Any:
                self.events.append(("read", number))
                return read()

            pending.read = noted  # type: ignore[method-assign]
            return pending

        core.launch = launched  # type: ignore[method-assign]

    @property
    def overlapped(self) -> list[int]:
        """The steps that were launched before the one before them was read."""
        at = {event: place for place, event in enumerate(self.events)}
        numbers = range(1, len(self.batches))
        return [n for n in numbers if at["launch", n] < at.get(("read", n - 1), -1)]
