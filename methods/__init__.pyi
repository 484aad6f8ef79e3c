from .distillation import distill_loss as distill_loss
from .preferences import preference_loss as preference_loss
from .reference import with_reference as with_reference
from .teacher import with_teacher as with_teacher
