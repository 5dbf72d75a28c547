"""A user's class in the place of one of transformers': `weightscope adopt SOURCE --with
module:Class`.

The class is imported on the user's word, in a child process, and never from the checkpoint's
folder. It is built from config.json, becomes a class of transformers by inheritance, and is then
adopted like any other.

    python -m weightscope.adopting.user_class < pickled Order    # started by `adopted_with`
"""

import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from weightscope.adopting.adopt import adopt, answer_of
from weightscope.adopting.tiny_models import class_and_line
from weightscope.core.compute.cores import end_with_parent
from weightscope.core.errors import CheckpointError
from weightscope.core.files import new_file, regular_file, scratch_folder
from weightscope.core.progress import progress_shown
from weightscope.model.sources import Source

ANSWER = "answer.json"


@dataclass(frozen=True)
class Order:
    """An order to the child process: a checkpoint, a class, and a place for the answer."""

    source: Source
    code: str  # module:Class
    attention: str  # pattern for the paths of modules that attend; empty: whatever takes a softmax
    answer: Path
    shows: bool  # progress
    parent: int


def adopted_with(source: Source, code: str, attention: str, shows: bool) -> Mapping[str, Any]:
    """The answer of a child process that imports the class: `answer_of` what was adopted."""
    module, colon, name = code.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        example = "training.model:Zephyrine"
        raise CheckpointError(
            f"`with` is '{code}'; it is module:Class, as Python imports it: {example}"
        )
    with scratch_folder() as folder:
        order = Order(source, code, attention, folder / ANSWER, shows, os.getpid())
        command = [sys.executable, "-P", "-m", "weightscope.adopting.user_class"]
        done = subprocess.run(command, input=pickle.dumps(order), check=False)
        if not order.answer.is_file():
            raise CheckpointError(
                f"the process that ran {code} ended with status {done.returncode} and no answer"
            )
        with regular_file(order.answer) as file:
            answer: dict[str, Any] = json.load(file)
    if "problem" in answer:
        raise CheckpointError(answer["problem"])
    return answer


def main() -> None:
    """Carry out the order on stdin."""
    order: Order = pickle.loads(sys.stdin.buffer.read())
    end_with_parent(order.parent)
    try:
        with redirect_stdout(sys.stderr), progress_shown(order.shows):
            answer = _carried_out(order)
    except CheckpointError as error:
        answer = {"problem": str(error)}
    with new_file(order.answer) as file:
        file.write(json.dumps(answer).encode())


def _carried_out(order: Order) -> dict[str, Any]:
    checkpoint = order.source.checkpoint()
    user_class = imported(order.code, checkpoint.folder)
    try:
        registered(user_class, checkpoint.config.raw, order.attention or "*")
    except (TypeError, AttributeError) as error:  # torch.nn.Module itself, or another metaclass
        problem = f"`with` {order.code} is no class that can be run: {class_and_line(error)}"
        raise CheckpointError(problem) from None
    return answer_of(adopt(checkpoint), checkpoint, f"{order.code} (PyTorch {torch.__version__})")


def imported(code: str, checkpoint_folder: Path) -> type:
    """The class; its module is looked for where Python does, and then in the working directory."""
    module_name, _, name = code.partition(":")
    sys.path.append(str(Path.cwd()))
    top = importlib.util.find_spec(module_name.partition(".")[0])
    places = (top.origin, *(top.submodule_search_locations or ())) if top else ()
    for place in filter(None, places):
        if Path(place).resolve().is_relative_to(checkpoint_folder.resolve()):
            problem = f"{module_name} lies in the checkpoint's folder, whose code is not run"
            advice = "copy what you wrote elsewhere"
            raise CheckpointError(f"{problem}; {advice}", file=checkpoint_folder)
    try:
        target = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # whatever the user's code raises
        raise CheckpointError(
            f"`with` {code} cannot be imported: {class_and_line(error)}"
        ) from None
    if not (isinstance(target, type) and issubclass(target, torch.nn.Module)):
        problem = f"{code} is not a torch.nn.Module"
        raise CheckpointError(f"{problem}; the class of the whole model was expected")
    return target


def registered(user_class: Any, values: Mapping[str, Any], attention: str) -> None:
    """Make the class one of transformers', which then builds it for the checkpoint's model_type."""
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(
            'config.json has no model_type; add a name of your own, such as "model_type": "mine"'
        )
    if issubclass(user_class, PreTrainedModel):
        made, config = user_class, user_class.config_class
        if config is None or config.model_type != kind:
            named = getattr(config, "model_type", None)
            raise CheckpointError(
                f"{user_class.__name__} is of model_type '{named}', and the checkpoint of '{kind}'"
            )
        user_class.attention_modules = attention
    else:
        config = type("OwnConfig", (PreTrainedConfig,), {"model_type": kind, "__init__": _all_keys})
        made = _as_transformers(user_class, config, attention)
    transformers.AutoConfig.register(kind, config, exist_ok=True)
    transformers.AutoModel.register(config, made, exist_ok=True)


def _all_keys(self: Any, **values: Any) -> None:
    """A config's __init__: every key of config.json is an attribute."""
    PreTrainedConfig.__init__(self, **values)
    for key, value in values.items():
        if not hasattr(self, key):
            setattr(self, key, value)


def _as_transformers(user_class: Any, config_class: type, attention: str) -> type:
    """A class that is the user's and transformers' both, with its own names, run on tokens."""

    class Base(PreTrainedModel):  # type: ignore[misc]
        """Comes between the user's class and torch's Module in the order of construction."""

        config_class: Any = None
        given: Any = None  # the config of the model that is being built

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(type(self).given)

        def _init_weights(self, module: Any) -> None:
            """Leave weights to the user's class."""

    names = list(inspect.signature(user_class.forward).parameters)[1:]
    if not names:
        raise CheckpointError(
            f"{user_class.__name__}.forward takes nothing; token ids of shape (1, n) were expected"
        )
    tokens = next((name for name in names if name in {"input_ids", "inputs_embeds"}), names[0])

    def build(self: Any, config: Any, *_: Any, **__: Any) -> None:
        made.given = config
        arguments = _arguments(user_class, config)
        user_class.__init__(self, *arguments.args, **arguments.kwargs)
        self.config = config
        self.post_init()

    def forward(self: Any, input_ids: Any) -> Any:
        return user_class.forward(self, **{tokens: input_ids})

    def forward_at(self: Any, input_ids: Any, position_ids: Any = None) -> Any:
        return user_class.forward(self, **{tokens: input_ids, "position_ids": position_ids})

    def save(self: Any, folder: Any) -> None:
        """config.json and every tensor once, under the names that the class gives them."""
        # save_pretrained refuses keys of generation
        self.config.to_json_file(Path(folder) / "config.json")
        tensors = {name: tensor.detach().clone() for name, tensor in self.named_parameters()}
        every_name = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        for name, tensor in self.state_dict().items():
            if name not in every_name:  # a buffer, and no tied parameter
                tensors[name] = tensor.clone()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, Path(folder) / "model.safetensors")

    made: Any = type(
        user_class.__name__,
        (user_class, Base),
        {
            "__init__": build,
            "forward": forward_at if "position_ids" in names else forward,
            "save_pretrained": save,
            "config_class": config_class,
            "base_model_prefix": "",
            "attention_modules": attention,
            "__module__": user_class.__module__,
        },
    )
    return made  # type: ignore[no-any-return]


def _arguments(user_class: Any, config: Any) -> inspect.BoundArguments:
    """The arguments of the user's class: keys of config.json by name, or the config alone."""
    signature, values = inspect.signature(user_class), config.to_dict()
    named = {name: values[name] for name in signature.parameters if name in values}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    lacking = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in named and parameter.default is parameter.empty and parameter.kind in kinds
    ]
    if not lacking:
        return signature.bind(**named)
    if len(lacking) > 1:
        names = ", ".join(parameter.name for parameter in lacking)
        raise ValueError(f"{user_class.__name__} needs {names}, which config.json does not have")
    (parameter,) = lacking
    kind = parameter.annotation
    with suppress(Exception):  # names that are not there when annotations are read
        kind = get_type_hints(user_class.__init__).get(parameter.name)
    argument: Any = values if kind is dict else config
    if is_dataclass(kind) and isinstance(kind, type):
        known = [cell.name for cell in fields(kind) if cell.name in values]
        argument = kind(**{name: values[name] for name in known})
        for cell in fields(kind):
            if not hasattr(config, cell.name):
                object.__setattr__(config, cell.name, getattr(argument, cell.name))
    return signature.bind(**named, **{parameter.name: argument})


if __name__ == "__main__":
    main()
