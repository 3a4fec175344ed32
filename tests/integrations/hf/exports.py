"""Cases of exports: a model is trained for a step in a run, exported, and loaded again by `from_pretrained`.
Each asserts what has to hold, and returns an empty record."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import distributed as dist
from torch import nn

import flashckpt
from flashckpt.errors import DamagedError, FlashckptError, MismatchError, NoSuchStepError, OptionError
from flashckpt.export.step import LIST
from flashckpt.store import open_store
from flashckpt.transformers import export, keep_config
from tests.folders import flip
from tests.integrations.job import Job

WORLD = 2
SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | options))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def lora(base: Any, **options: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], **options)
    return peft.get_peft_model(base, config)


def trained(folder: Path, model: Any, tokenizer: Any = None, *, keep: bool = True, **state: Any) -> Any:
    """A step of training in a run, with the assets that a trainer's integration keeps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    options: dict[str, Any] = {"every": None, "persist_every": None}
    named = {"model": model, "optimizer": optimizer, **state}
    with flashckpt.attach(folder, state=named, **options) as job:
        ids = torch.arange(16).view(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.step()
        job.save()
        job.wait()
    if keep and (not dist.is_initialized() or dist.get_rank() == 0):
        assert keep_config(folder, model, tokenizer)
    return model


def check_same(loaded: Any, expected: dict[str, torch.Tensor]) -> None:
    found = loaded.state_dict()
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype, name
        assert torch.equal(found[name], each), name


def loaded_from(out: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    model, report = kind.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


def refuses(kind: type[FlashckptError], words: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        export(*arguments, **options)


def case_tied(home: Path) -> None:
    tokenizer = made_tokenizer()
    model = gpt2()
    model.generation_config.max_new_tokens = 7
    trained(home / "run", model, tokenizer)
    done = export(home / "run", home / "out")
    assert done.format == "hf"
    assert {name for name, _ in done.files} >= {"config.json", "generation_config.json", "model.safetensors"}
    loaded = loaded_from(home / "out")
    check_same(loaded, model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert loaded.generation_config.max_new_tokens == 7
    again = transformers.AutoTokenizer.from_pretrained(home / "out")
    assert again("a c b").input_ids == tokenizer("a c b").input_ids
    assets = home / "run" / "assets.json"
    flip(assets, assets.stat().st_size // 2)
    refuses(DamagedError, "assets.json", home / "run", home / "again")
    assert sorted(os.listdir(home)) == ["out", "run"]


def made_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def case_wrapped(home: Path) -> None:
    """A compiled model in DistributedDataParallel: names and config are those of the model itself."""
    dist.init_process_group("gloo", f"file://{home}/store", world_size=1, rank=0)
    model = gpt2()
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    trained(home / "run", wrapped)
    dist.destroy_process_group()
    export(home / "run", home / "out")
    check_same(loaded_from(home / "out"), model.state_dict())


def case_sharded(home: Path) -> None:
    model = trained(home / "run", llama(tie_word_embeddings=False))
    export(home / "run", home / "out", max_shard_size="4KB")
    index = json.loads((home / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    check_same(loaded_from(home / "out"), model.state_dict())
    # The module's own names, streamed without transformers.
    from flashckpt.export.step import export as plain

    plain(open_store(home / "run"), str(home / "plain"), only=["model"], max_shard_size="4KB")
    (home / "plain" / "config.json").write_bytes((home / "out" / "config.json").read_bytes())
    check_same(loaded_from(home / "plain"), model.state_dict())
    export(home / "run", home / "cast", dtype=torch.bfloat16)
    check_same(loaded_from(home / "cast"), model.bfloat16().state_dict())
    assert json.loads((home / "cast" / "config.json").read_text())["dtype"] == "bfloat16"


def case_experts(home: Path) -> None:
    model = trained(home / "run", mixtral().to(torch.bfloat16))
    export(home / "run", home / "out", max_shard_size="8KB")
    names = json.loads((home / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("experts.3.w2.weight" in name for name in names), "as on the hub, and not fused"
    check_same(loaded_from(home / "out"), model.state_dict())


def case_lora(home: Path) -> None:
    """Two adapters, one of which saves a module whole."""
    base = llama()
    fresh = copy.deepcopy(base)
    model = lora(base, modules_to_save=["lm_head"])
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["k_proj"]))
    trained(home / "run", model, made_tokenizer())
    out = home / "out"
    export(home / "run", out)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= set(os.listdir(out))
    assert not (out / "config.json").exists()
    loaded = peft.PeftModel.from_pretrained(fresh, out)
    loaded.load_adapter(out / "other", "other")
    check_same(loaded, model.state_dict())
    config = peft.PeftConfig.from_pretrained(out)
    assert config.init_lora_weights is True
    assert config.r == 2
    refuses(OptionError, "max_shard_size", home / "run", home / "o", max_shard_size="1GB")


def case_refusals(home: Path) -> None:
    run, out = home / "run", home / "out"
    model = trained(run, gpt2(), keep=False, other=nn.Linear(2, 2))
    model.config.architectures = ["GPT2LMHeadModel"]
    known, unknown, foreign = (home / name for name in ("known", "unknown", "foreign"))
    model.config.save_pretrained(known)
    table = json.loads((known / "config.json").read_text())
    for folder, change in ((unknown, {"model_type": "gpt77"}), (foreign, {"architectures": ["MyModel"]})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**table, **change}))
    refuses(OptionError, "--config FOLDER", run, out)
    refuses(OptionError, "has model, other", run, out, config=known)
    refuses(NoSuchStepError, "77", run, out, 77, config=known, only="model")
    refuses(OptionError, "exports one module", run, out, config=known, only="optimizer")
    refuses(MismatchError, "does not match the model", run, out, config=known, only="other")
    refuses(OptionError, "does not know", run, out, config=unknown, only="model")
    refuses(OptionError, "MyModel is not one of transformers", run, out, config=foreign, only="model")
    assert not out.exists()
    assert not [each for each in os.listdir(home) if each.endswith(".tmp")]
    export(run, out, config=foreign, only="model", model_class=transformers.GPT2LMHeadModel)
    check_same(loaded_from(out), model.state_dict())
    refuses(OptionError, "is not empty", run, out, config=known, only="model")
    export(run, out, config=known, only="model", force=True)
    assert (out / LIST).exists()


def case_untied(home: Path) -> None:
    """The config ties what the run has trained apart: one of the two would be lost."""
    model = gpt2()
    model.lm_head.weight = nn.Parameter(torch.randn(64, 16))
    trained(home / "run", model)
    refuses(MismatchError, "ties", home / "run", home / "out")
    assert not (home / "out").exists()


def ranks(job: Job) -> dict[str, Any]:
    """FSDP2 on two ranks: whole tensors from their shards, with a tie."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = llama(tie_word_embeddings=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained(job.folder / "run", model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dist.barrier()
    dist.destroy_process_group()
    if job.rank == 0:
        export(job.folder / "run", job.folder / "out", max_shard_size="4KB")
        check_same(loaded_from(job.folder / "out"), state)
    return {}


def single(job: Job) -> dict[str, Any]:
    """The case that the option `export` names."""
    globals()[f"case_{job.options['export']}"](job.folder)
    return {}
