from .arguments import TrainingArguments as TrainingArguments  # needs accelerate
from .trainer import Trainer as Trainer  # needs accelerate
