from .trainer import Trainer as Trainer  # needs accelerate
from .training_arguments import TrainingArguments as TrainingArguments  # needs accelerate
