from ..models.reward import reward_layers as reward_layers
from .distillation import distill_loss as distill_loss
from .preferences import preference_loss as preference_loss
from .reference import with_reference as with_reference
from .reward import reward_loss as reward_loss
from .teacher import with_teacher as with_teacher
