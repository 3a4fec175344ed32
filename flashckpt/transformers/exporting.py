"""Exports a step to a folder for `from_pretrained`, written by the model's own `save_pretrained`.

Builds the model on the meta device from the config in the run, and fills it with mapped tensors, so that no
weight is copied in memory before the model's own code writes it.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashckpt.checkpointer.trainer_run import require
from flashckpt.commit.assets import has_assets, read_assets, write_assets
from flashckpt.commit.view import open_run
from flashckpt.errors import MismatchError, OptionError
from flashckpt.export.formats import Progress, Selected, dtype_name, tensors_of
from flashckpt.export.step import Exported, Request, export_with
from flashckpt.format.names import AttemptName, SnapshotId
from flashckpt.options import user_path
from flashckpt.store import open_store
from flashckpt.store.base import Store

_CONFIG, _GENERATION, _ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
# Prefixes that torch.compile and DistributedDataParallel add to names.
_WRAPPERS = ("_orig_mod.", "module.")
_SHOWN = 5


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    step: int | None = None,
    dtype: object | None = None,
    max_shard_size: int | str | None = None,
    *,
    only: str | None = None,
    config: str | os.PathLike[str] | None = None,
    model_class: Callable[[Any], Any] | None = None,
    force: bool = False,
) -> Exported:
    """Write the model of a committed step to a folder for `from_pretrained`: weights, config, generation
    config and tokenizer. A model with PEFT adapters gives an adapter folder, for `PeftModel.from_pretrained`.

    step: None takes the newest. dtype: of floating-point tensors. max_shard_size: see `save_pretrained`.
    only: the name of the model in the run, if the run has several modules. config: a folder with
    `config.json` (and tokenizer files), used instead of the run's own. model_class: makes the model from its
    config, if its class is not one of transformers.

    Raises OptionError, MismatchError if the step's tensors do not match the model, NoSuchStepError,
    DamagedError. After an error, `out` is unchanged.
    """
    return export_step(
        open_store(run),
        os.fspath(out),
        step=step,
        only=() if only is None else (only,),
        dtype=dtype,
        max_shard_size=max_shard_size,
        config=None if config is None else os.fspath(config),
        model_class=model_class,
        force=force,
    )


def export_step(
    store: Store,
    out: str,
    *,
    step: int | None = None,
    at: AttemptName | SnapshotId | None = None,
    only: Sequence[str] = (),
    dtype: object | None = None,
    max_shard_size: int | str | None = None,
    config: str | None = None,
    model_class: Callable[[Any], Any] | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Like `export`, for a store and a step of any attempt."""
    require("transformers", "transformers")
    request = Request(
        out=out,
        format="hf",
        step=step,
        at=at,
        only=tuple(only),
        dtype=None if dtype is None else dtype_name(dtype),
        one_module=True,
        is_folder=True,
        force=force,
        progress=progress,
    )
    with tempfile.TemporaryDirectory(prefix="flashckpt-export-") as temporary:
        source = Path(temporary) if config is None else Path(user_path(config))
        if config is None:
            _unpack(read_assets(store), source)
        if not (source / _CONFIG).is_file():
            why = f"{store.url} has no model config" if config is None else f"{config} has no {_CONFIG}"
            raise OptionError(
                f"format='hf': {why}, which is needed to build the model. Nothing was written. Give "
                f"--config FOLDER (config=), a folder with the model's {_CONFIG} and tokenizer files."
            )
        return export_with(
            store, lambda path, selected: _write(path, selected, source, max_shard_size, model_class), request
        )


def assets_of(model: Any, processing_class: Any = None) -> dict[str, bytes]:
    """The files of a model and its tokenizer (or processor) that a run stores for `export`, by name: config,
    generation config, adapter configs, tokenizer files. Each object writes its files by `save_pretrained`.
    Raises OptionError if that fails."""
    try:
        return _assets_of(_unwrapped(model), processing_class)
    except Exception as error:
        # Their code may raise any error: an invalid generation config, a config with a value outside of JSON.
        raise OptionError(
            f"save_pretrained of the config or the tokenizer failed: {error!r}. None of their files was "
            "stored. Correct them, and call flashckpt.transformers.keep_config."
        ) from error


def _assets_of(model: Any, processing_class: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="flashckpt-assets-") as temporary:
        folder = Path(temporary)
        base = model.get_base_model() if _is_peft(model) else model
        if hasattr(getattr(base, "config", None), "save_pretrained"):
            config = copy.deepcopy(base.config)
            # FSDP2 derives a class with this prefix.
            config.architectures = [type(base).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
            if getattr(base, "generation_config", None) is not None and base.can_generate():
                base.generation_config.save_pretrained(folder)
        if _is_peft(model):
            for name, adapter in model.peft_config.items():
                adapter.save_pretrained(folder if name == "default" else folder / name)
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }


def keep_config(run: str | os.PathLike[str], model: Any, processing_class: Any = None) -> bool:
    """Store the files of `assets_of` in a run, as `train` does. Return False, and write nothing, if the run
    already has such files. Call it on one rank, outside of the loop. Raises OptionError, RunError,
    OSError."""
    store = open_store(run)
    open_run(store, create=False)
    return not has_assets(store) and write_assets(store, assets_of(model, processing_class))


def _unpack(assets: Mapping[str, bytes], folder: Path) -> None:
    for name, data in assets.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _unwrapped(model: Any) -> Any:
    """The model inside torch.compile and DistributedDataParallel."""
    if (compiled := getattr(model, "_orig_mod", None)) is not None:
        return _unwrapped(compiled)
    if not hasattr(model, "save_pretrained") and hasattr(model, "module"):
        return _unwrapped(model.module)
    return model


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _write(
    path: str,
    selected: Selected,
    source: Path,
    max_shard_size: int | str | None,
    model_class: Callable[[Any], Any] | None,
) -> None:
    adapters = _adapters(source)
    if adapters and max_shard_size is not None:
        raise OptionError(
            "max_shard_size= is not supported for adapters: PEFT writes their weights to one file. Nothing "
            "was written. Leave it out."
        )
    model, configs = _build(source, model_class, adapters)
    names = _adapter_names(model, adapters) if adapters else None
    tensors = _load(model, selected, tensors_of(_needed(selected, names)), names)
    if adapters:
        model.peft_config.update(configs)
    else:
        _check_filled(model, selected, tensors)
    os.mkdir(path)
    model.save_pretrained(path, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    for file in source.rglob("*"):
        name = file.relative_to(source).as_posix()
        if file.is_file() and name not in adapters.values() and _is_of_tokenizer(name):
            _unpack({name: file.read_bytes()}, Path(path))


def _is_of_tokenizer(name: str) -> bool:
    """Whether a file belongs to a tokenizer or processor: a folder of --config may also have weights, code
    and files of a repository."""
    if name in (_CONFIG, _GENERATION) or any(part.startswith(".") for part in name.split("/")):
        return False
    suffixes = (".json", ".model", ".txt", ".jinja", ".tiktoken")
    return name.endswith(suffixes) and not name.endswith(".index.json")


def _adapters(source: Path) -> dict[str, str]:
    """Names of the adapters in a folder, each with the path of its config."""
    found = sorted(path.relative_to(source) for path in source.rglob(_ADAPTER))
    return {"default" if len(each.parts) == 1 else each.parts[0]: each.as_posix() for each in found}


def _build(
    source: Path, model_class: Callable[[Any], Any] | None, adapters: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """Build the model without weights. Also return the original configs of its adapters."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (ValueError, KeyError) as error:
        raise OptionError(
            f"format='hf': transformers {transformers.__version__} does not know the config of the model "
            f"({error}). Nothing was written. Export with --format safetensors, or with the release that "
            "trained the model."
        ) from error
    if adapters and getattr(config, "quantization_config", None) is not None:
        # The base model is not exported, and quantized weights cannot be built on the meta device.
        del config.quantization_config
    named = next(iter(config.architectures or ()), "")
    factory = model_class or getattr(transformers, named, None)
    if factory is None:
        raise OptionError(
            f"format='hf': the model's class {named or '(not in its config)'} is not one of transformers. "
            "Nothing was written. Call flashckpt.transformers.export with model_class=, or export with "
            "--format safetensors."
        )
    with torch.device("meta"):
        model = factory(config)
        configs: dict[str, Any] = {}
        if adapters:
            model, configs = _with_adapters(model, source, adapters)
    if (source / _GENERATION).is_file() and not adapters:
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model, configs


def _with_adapters(model: Any, source: Path, adapters: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    require("peft", "peft")
    import peft

    configs = {
        name: peft.PeftConfig.from_pretrained(source / Path(at).parent) for name, at in adapters.items()
    }
    for name, config in configs.items():
        without = copy.deepcopy(config)
        for option in ("init_lora_weights", "init_weights"):
            if hasattr(without, option):
                # An initialization from the base model (PiSSA) would need its weights.
                setattr(without, option, False)
        without.inference_mode = False
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, without)
        else:
            model = peft.get_peft_model(model, without, adapter_name=name, autocast_adapter_dtype=False)
    return model, configs


def _adapter_names(model: Any, adapters: Iterable[str]) -> set[str]:
    """Names of the parameters that PEFT may save: those that each adapter trains, and the embeddings, which
    it saves if the vocabulary has grown."""
    found = set()
    for adapter in adapters:
        model.set_adapter(adapter)
        found |= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = [each() for each in (model.get_input_embeddings, model.get_output_embeddings)]
    embeddings = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    return found | {n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in embeddings}


def _needed(selected: Selected, names: Set[str] | None) -> Selected:
    """Keep only leaves with one of `names` in the model; None keeps all."""
    if names is None:
        return selected
    inside = _inside(selected)
    leaves = [
        each
        for each in selected.leaves
        if any(inside(name) in names for name in (each.leaf.name, *each.leaf.aliases))
    ]
    return replace(selected, leaves=leaves)


def _load(
    model: Any, selected: Selected, loaded: Mapping[str, Any], names: Set[str] | None
) -> dict[str, Any]:
    """Fill the model with the loaded tensors, or only with those in `names`. Return them by their names in
    the model."""
    inside = _inside(selected)
    tensors = {inside(name): each for name, each in loaded.items()}
    if names is not None:
        tensors = {name: each for name, each in tensors.items() if name in names}
    try:
        found = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise _other_model(selected, str(error)) from error
    if found.unexpected_keys:
        raise _other_model(selected, f"it has no {_some(found.unexpected_keys)}")
    if names is not None and (missing := sorted(names & set(found.missing_keys))):
        raise _other_model(selected, f"the step has no {_some(missing)}")
    return tensors


def _inside(selected: Selected) -> Callable[[str], str]:
    """Return a function from a tensor's name to its name in the unwrapped model."""
    names = [each.leaf.name for each in selected.leaves]
    prefix = ""
    while (more := next((w for w in _WRAPPERS if all(n.startswith(prefix + w) for n in names)), "")) != "":
        prefix += more
    return lambda name: name.removeprefix(prefix)


def _check_filled(model: Any, selected: Selected, tensors: Mapping[str, Any]) -> None:
    """Raise MismatchError unless the model's own state is exactly these tensors."""
    import torch

    model.tie_weights()
    state = model.state_dict()
    if missing := [name for name, each in state.items() if each.is_meta]:
        raise _other_model(selected, f"the step has no {_some(missing)}")
    for name, each in tensors.items():
        # The config may tie tensors that the run trained separately.
        if state[name].data_ptr() != each.data_ptr() and not torch.equal(state[name], each):
            raise _other_model(selected, f"the config ties {name} to another tensor, but the step does not")


def _other_model(selected: Selected, why: str) -> MismatchError:
    return MismatchError(
        f"Step {selected.record.step} does not match the model of the config: {why}. Nothing was written. "
        "Give the config with which the run was trained by --config FOLDER.",
        differences=(),
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
