"""What comes in between: after a micro-batch, or between a forward and its backward."""

from __future__ import annotations

import contextlib
import re

import pytest

from program_backwards import Backwards
from program_pair import Operation


class InBetween(Backwards):
    """Operations that do others, or set modes, where gradients or a graph are held."""

    def set_late(self, mode: str) -> None:
        """The mode of a micro-batch is set between its forward and its backward."""
        losses = self.forward(*self.batch())
        with self.mode(mode):
            self.backward(*losses)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if losses[0].requires_grad:
            self.after_backward()
        self.zero()

    def between(self, mode: str, *what: Operation) -> None:
        """Something is done after a micro-batch, before the last one."""
        self.micro(mode)
        for each in what:
            self.do(each)
        losses = self.forward(*self.batch())
        self.backward(*losses)
        if losses[0].requires_grad:
            self.after_backward()
        self.zero()

    def before_backward(self, *what: Operation) -> None:
        """Something is done between a forward and its backward.

        Backward through what was moved is an error, and the next step is right. So is one that
        recomputes what saves something else now that it is frozen, as in the plain model.
        """
        expected, loss = self.forward(*self.batch())
        for each in what:
            self.do(each)
        self.had_backward = expected.requires_grad
        if self.had_backward:
            refusal = "were moved, cast or" if ("move",) in what else ""
            try:
                expected.backward()
            except RuntimeError as error:
                refusal = refusal or re.escape(str(error)[:40])
            with (
                pytest.raises(RuntimeError, match=refusal) if refusal else contextlib.nullcontext()
            ):
                loss.backward()
            if refusal:
                self.zero()
                # The plain model may have recomputed its forwards.
                for buffer, same in zip(self.model.buffers(), self.plain.buffers(), strict=True):
                    buffer.copy_(same)
                self.step("reduce")
                return
        self.after_backward()
        self.zero()
