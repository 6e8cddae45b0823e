"""How much work a recovery is, and how much of it is left after a step: the schedule is known in advance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from opdcl.config.recover import RecoverConfig
from opdcl.distill.prompts import Prompts
from opdcl.distill.schedule import STREAMS, Step, Stream, plan_steps, sampled_together
from opdcl.model.costs import Costs, Work, decoding, sized, total

# Scales of the adapter that are measured for a start, from tuned, 1, towards base, 0, until less is gained
# than lost; closer together where answers change from the domain's to base's.
BETWEEN = (0.65, 0.5, 0.4, 0.3, 0.2, 0.1)

# Passes over the held-out texts before the first step: the teachers' own, base and tuned.
FIRST_PASSES = 3


def answer_name(config: RecoverConfig, stream: Stream) -> str:
    """Return the name under which the lengths of a stream's completions are kept."""
    general = " ".join(config.general_sources()) or "own"
    return f"{general if stream == 'general' else config.domain or 'own'} {config.limit(stream)}"


@dataclass
class RecoveryWork:
    """The lengths of a stage's prompts, in tokens, and its steps.

    `dynamic` holds the streams whose teacher changes as the student learns.
    """

    config: RecoverConfig
    costs: Costs
    steps: Sequence[Step]
    prompts: Mapping[Stream, Sequence[int]]
    held_out: Mapping[Stream, Sequence[int]]
    dynamic: Collection[Stream] = ()
    ahead: Collection[int] = ()
    """The steps whose completions are there already; grows and shrinks during the stage."""

    @classmethod
    def of(
        cls,
        config: RecoverConfig,
        costs: Costs,
        streams: Mapping[Stream, Prompts],
        dynamic: Collection[Stream],
    ) -> RecoveryWork:
        """Return the work of a recovery on these prompts."""
        train: dict[Stream, list[int]] = {s: [len(x.ids) for x in p.train] for s, p in streams.items()}
        if config.method == "general":
            train["domain"] = []
        held_out: dict[Stream, list[int]] = {s: [len(x.ids) for x in p.held_out] for s, p in streams.items()}
        trains = config.method != "interpolate"
        steps = plan_steps(config, len(train["general"]), len(train["domain"])) if trains else []
        return cls(config, costs, steps, train, held_out, dynamic)

    def portion(self, step: int, tokens: float) -> tuple[str, float]:
        """Return kind and amount of the learning in a step, given how many tokens its completions have."""
        planned = self.steps[step - 1]
        lengths = self.prompts[planned.stream]
        read = planned.keep * fmean(lengths[p] for p in planned.prompts)
        return sized(f"learn {planned.stream}", read + tokens), read + tokens

    def left(self, step: int) -> Work | None:
        """Return the work after a step; None if the length of an answer is not known."""
        means = {s: self.answer_length(s) for s in STREAMS if self.prompts[s]}
        if None in means.values():
            return None
        works, there = [self._validations(step, means)], set(self.ahead)
        for index in range(step, len(self.steps)):
            planned = self.steps[index]
            kind, amount = self.portion(index + 1, planned.keep * (means[planned.stream] or 0))
            works.append({kind: amount})
            if index not in there:
                batch = sampled_together(self.config, self.steps, index, planned.stream in self.dynamic)
                there.update(batch)
                works.append(self._sampling(planned.stream, batch, means[planned.stream] or 0))
        return total(*works)

    def whole(self, step: int = 0) -> Work | None:
        """Return the work of the stage, with what comes before it starts, or resumes after `step`."""
        work = self.left(step)
        if work is None:
            return None
        first = 1 if step else FIRST_PASSES
        if not step and self.config.start == "auto":
            first += len(BETWEEN)
        works = [work]
        for stream, lengths in self.held_out.items():
            if lengths:
                mean = self.answer_length(stream) or 0
                works.append(decoding(lengths, mean, self.config.limit(stream), len(lengths)))
                works.append({"measure": first * (sum(lengths) + mean * len(lengths))})
        return total(*works)

    def answer_length(self, stream: Stream) -> float | None:
        """Return the mean length of a stream's completions."""
        return self.costs.unit(f"answer {answer_name(self.config, stream)}")

    def _sampling(self, stream: Stream, batch: Sequence[int], mean: float) -> Work:
        lengths = [self.prompts[stream][p] for i in batch for p in self.steps[i].prompts]
        limit = self.config.limit(stream, self.steps[batch[0]].on_policy)
        return decoding(lengths, min(mean, limit), limit, max(len(lengths), 1))

    def _validations(self, step: int, means: Mapping[Stream, float | None]) -> Work:
        every, last = self.config.validate_every, len(self.steps)
        count = last // every - step // every + (last % every > 0 and step < last)
        read = {s: sum(lengths) + len(lengths) * (means.get(s) or 0) for s, lengths in self.held_out.items()}
        prompts, own = self.held_out["general"], means.get("general") or 0
        # Student and base read the student's own answers.
        work = {"measure": count * (sum(read.values()) + 2 * read["general"])}
        return total(work, *[decoding(prompts, own, self.config.limit("general"), len(prompts))] * count)
