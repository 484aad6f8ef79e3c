from .preferences import preference_loss as preference_loss
from .reference import with_reference as with_reference
