from .answers import Answers as Answers
from .dataloader import RepeatingLoader as RepeatingLoader
from .token_data import TokenData as TokenData
from .token_folder import TokenFolder as TokenFolder
from .token_loader import TokenLoader as TokenLoader
from .tokenization import tokenize as tokenize
from .tokenizer import open_tokenizer as open_tokenizer
from .tokenizer import train_tokenizer as train_tokenizer
