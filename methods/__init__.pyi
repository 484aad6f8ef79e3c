from .kto import kto_loss as kto_loss
from .preferences import preference_loss as preference_loss
from .reference import row_log_probs as row_log_probs
from .reference import with_baseline as with_baseline
from .reference import with_reference as with_reference
