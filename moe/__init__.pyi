from .experts import GEGLU as GEGLU
from .experts import GELU as GELU
from .experts import Activation as Activation
from .experts import ReLU as ReLU
from .experts import SwiGLU as SwiGLU
from .layer import MoE as MoE
from .module_experts import ModuleMoE as ModuleMoE
