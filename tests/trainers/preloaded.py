"""Imports of the process that ranks are forked from."""

import os

from tests.trainers.launch import ENV

os.environ.update(ENV)  # some of it is read at import

import deepspeed
import deepspeed.ops  # noqa: F401
import peft  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401
import transformers.models.qwen2  # noqa: F401

import tests.trainers.process  # noqa: F401
