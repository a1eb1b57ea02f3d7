"""Plain data: splits of parameters, decisions of styles, steps of activations.

No value holds a process group or a device. The planner prints these values, the runtime executes them.
"""

from tp_styles.values.spec import ModuleInfo as ModuleInfo
from tp_styles.values.spec import ParameterInfo as ParameterInfo
from tp_styles.values.spec import ParameterSpec as ParameterSpec
from tp_styles.values.spec import PerRank as PerRank
from tp_styles.values.spec import Redistribution as Redistribution
from tp_styles.values.spec import StyleSpec as StyleSpec
from tp_styles.values.split import Section as Section
from tp_styles.values.split import Split as Split
