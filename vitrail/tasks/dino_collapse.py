"""The collapse alarm of DINO: what the teacher's outputs on the validation images show, and the setting to change.

The limits were measured over 3 to 12 epochs of `dino_small` (n = 3 seeds for 3 epochs, 1 for more) with vitrail_mini and with a
small ViT, 1,024 and 4,096 outputs, on the built-in pets (at 32 and 64 pixels) and digits. Some of these trainings are
repeated, in miniature, by `tests/tasks/test_dino_collapse.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from vitrail.recipes.task_options import DinoOptions

# Information on the image in nats: 0.1 to 0.4 for pets, 0.011 to 0.06 for digits, below 0.005 where digits had collapsed.
COLLAPSED = 0.005
# A teacher that is not clearly sharper than the student makes all outputs uniform, long before the features are equal. With a
# temperature of 0.2 for the teacher and 0.1 for the student the information was at most 0.013, also for pets.
UNINFORMED, MAX_TEMPERATURE = 0.05, 0.8  # of the student's temperature
# Share of the variance of the outputs that is common to all images: at most 0.33 for pets. It is up to 0.8 for digits, whose
# outputs are nearly uniform: the entropy of their mean is within 0.06 of its limit. Without centering it is 0.75 or more, with an
# entropy that is 1 to 7 lower.
COMMON, COMMON_SPREAD = 0.6, 0.5
NO_CENTERING = 0.999  # of center_momentum
CENTERED = 5.0  # time constants of the center's EMA after which it should have reached the mean of the outputs
SIMILAR_VIEWS = "give views that have more in common: a higher augmentation.scale or task_options.local_scale"


class CollapseAlarm:
    """Reports a collapse of the outputs that two validations in a row show."""

    def __init__(self, options: DinoOptions, lr: float) -> None:
        self.options, self.lr = options, lr
        self.limit = math.log(options.outputs)  # the entropy of the uniform distribution
        self.before = ("", 0.0, 0)  # kind of collapse, information and step of the validation before

    def check(self, values: Mapping[str, Any], temperature: float, step: int, warmed_up: bool) -> str:
        """What is wrong after so many steps, with the current `temperature` of the teacher; "" if nothing."""
        kind, information = self.find_kind(values, temperature, step, warmed_up), float(values["information"])
        kind_before, information_before, step_before = self.before
        # The report checks all validations once more, from the first on, which no other is before.
        repeated = step_before < step and kind == kind_before and (kind != "uniform" or information <= information_before)
        self.before = (kind, information, step)
        return self.explain(kind, values, temperature) if kind and repeated else ""

    def find_kind(self, values: Mapping[str, Any], temperature: float, step: int, warmed_up: bool) -> str:
        """ "hot": the teacher's temperature is too high; "common": no centering; "uniform": other reasons; "": no collapse."""
        o, information = self.options, float(values["information"])
        if step and information < UNINFORMED and temperature > MAX_TEMPERATURE * o.student_temperature:
            return "hot"
        expected = step * (1 - o.center_momentum) > CENTERED or o.center_momentum > NO_CENTERING
        if step and expected and values["common_output"] > COMMON and self.limit - values["mean_output_entropy"] > COMMON_SPREAD:
            return "common"
        return "uniform" if warmed_up and information < COLLAPSED else ""

    def explain(self, kind: str, values: Mapping[str, Any], temperature: float) -> str:
        o = self.options
        if kind == "common":
            off = o.center_momentum > NO_CENTERING
            return (
                f"the same outputs dominate for all images ({values['common_output']:.0%} of the variance of the outputs is "
                f"common to all, the entropy of their mean is {values['mean_output_entropy']:.2f} of at most {self.limit:.2f}): "
                f"the network collapses, since task_options.center_momentum={o.center_momentum:g} "
                + ("turns centering off; set it to 0.9." if off else "makes the center too slow; lower it.")
            )
        start = (
            "the teacher's outputs are nearly uniform and say nothing about the image (entropy "
            f"{values['output_entropy']:.3f} of at most {self.limit:.3f}, information {values['information']:.4f}): the network "
        )
        if kind == "hot":
            low, high = 0.4 * o.student_temperature, 0.7 * o.student_temperature
            return (
                f"{start}collapses, since task_options.teacher_temperature={temperature:.3g} is too high for "
                f"student_temperature={o.student_temperature:g}; set it to {low:.2g} to {high:.2g}."
            )
        return (
            f"{start}has collapsed; lower optimizer.lr={self.lr:g} or task_options.teacher_temperature={temperature:.3g}, or "
            f"{SIMILAR_VIEWS}."
        )
