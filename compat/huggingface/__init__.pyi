from .arguments import TrainingArguments as TrainingArguments
from .trainer import Trainer as Trainer
