from .policy import grpo_loss as grpo_loss
from .preferences import preference_loss as preference_loss
from .reference import with_reference as with_reference
from .rollouts import Rollouts as Rollouts
from .rollouts import with_token_reference as with_token_reference
from .rowwise import exact_rows as exact_rows
