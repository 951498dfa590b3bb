//! Writes checkpoints: gpt-oss-nano itself, or a model of a few kilobytes, in either layout, with edits.

use std::collections::BTreeMap;
use std::path::Path;

use model::{Checkpoint, Dtype, LayerParam, ModelConfig, Param};
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub(crate) struct Stored {
    pub(crate) dtype: safetensors::Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

pub(crate) type Tensors = BTreeMap<String, Stored>;

pub(crate) fn nano_config() -> Value {
    serde_json::from_str(include_str!("../../gpt-oss-nano/config.json")).expect("nano's config is json")
}

/// One sliding and one full layer, 4 experts of 64 units, 20 kB of weights.
pub(crate) fn tiny_config() -> Value {
    let mut config = nano_config();
    for (field, value) in [
        ("num_hidden_layers", json!(2)),
        ("layer_types", Value::Null),
        ("hidden_size", json!(32)),
        ("intermediate_size", json!(64)),
        ("num_local_experts", json!(4)),
        ("num_attention_heads", json!(2)),
        ("num_key_value_heads", json!(2)),
        ("vocab_size", json!(64)),
    ] {
        config[field] = value;
    }
    config
}

/// The same model in the dialect of `original/config.json`.
pub(crate) fn original_config(config: &Value) -> Value {
    let rope = &config["rope_scaling"];
    json!({
        "num_hidden_layers": config["num_hidden_layers"], "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"], "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"], "intermediate_size": config["intermediate_size"],
        "swiglu_limit": config["swiglu_limit"], "head_dim": config["head_dim"],
        "num_attention_heads": config["num_attention_heads"], "num_key_value_heads": config["num_key_value_heads"],
        "sliding_window": config["sliding_window"], "initial_context_length": rope["original_max_position_embeddings"],
        "rope_theta": config["rope_theta"], "rope_scaling_factor": rope["factor"],
        "rope_ntk_alpha": rope["beta_slow"], "rope_ntk_beta": rope["beta_fast"]
    })
}

/// Tensors of any model under their Hugging Face names, filled with bytes that differ from place to place; no scale is
/// 255.
pub(crate) fn tensors(config: &Value) -> Tensors {
    let config = ModelConfig::from_json(&config.to_string(), Path::new("config.json")).expect("a supported config");
    let mut tensors = Tensors::new();
    for (seed, param) in Param::all(&config).enumerate() {
        let (shape, dtype) = (param.shape(&config), param.dtype(&config));
        let num_bytes = shape.iter().product::<usize>() * dtype.bytes();
        let is_scale = matches!(param, Param::Layer(_, LayerParam::GateUpScales | LayerParam::DownScales));
        let byte = |i: usize| {
            let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(seed as u64 * 77) >> 33;
            // A bf16 with a high byte up to 100 is finite, so that equal tensors compare equal.
            match dtype {
                _ if is_scale => 118 + (mixed % 5) as u8,
                Dtype::U8 | Dtype::F8E4M3 => (mixed % 251) as u8,
                Dtype::Bf16 => (mixed % 101) as u8,
            }
        };
        let dtype = match dtype {
            Dtype::Bf16 => safetensors::Dtype::BF16,
            Dtype::U8 => safetensors::Dtype::U8,
            Dtype::F8E4M3 => safetensors::Dtype::F8_E4M3,
        };
        tensors.insert(param.to_string(), Stored { dtype, shape, bytes: (0..num_bytes).map(byte).collect() });
    }
    tensors
}

/// Renames Hugging Face tensors to the original layout and fuses q, k and v.
pub(crate) fn to_original(tensors: Tensors) -> Tensors {
    let mut original = Tensors::new();
    let mut fused: BTreeMap<String, [Option<Stored>; 3]> = BTreeMap::new();
    for (name, stored) in tensors {
        let renamed = name
            .replace("model.layers.", "block.")
            .replace("model.embed_tokens.weight", "embedding.weight")
            .replace("model.norm.weight", "norm.scale")
            .replace("lm_head.weight", "unembedding.weight")
            .replace("input_layernorm.weight", "attn.norm.scale")
            .replace("post_attention_layernorm.weight", "mlp.norm.scale")
            .replace("self_attn.sinks", "attn.sinks")
            .replace("self_attn.o_proj", "attn.out")
            .replace("mlp.router", "mlp.gate")
            .replace("mlp.experts.gate_up_proj_bias", "mlp.mlp1_bias")
            .replace("mlp.experts.down_proj_bias", "mlp.mlp2_bias")
            .replace("mlp.experts.gate_up_proj_", "mlp.mlp1_weight.")
            .replace("mlp.experts.down_proj_", "mlp.mlp2_weight.");
        match ["q", "k", "v"].iter().position(|part| renamed.contains(&format!("self_attn.{part}_proj"))) {
            Some(part) => {
                let letter = ["q", "k", "v"][part];
                let name = renamed.replace(&format!("self_attn.{letter}_proj"), "attn.qkv");
                fused.entry(name).or_default()[part] = Some(stored);
            }
            None => {
                original.insert(renamed, stored);
            }
        }
    }
    for (name, parts) in fused {
        let mut parts = parts.into_iter().map(|part| part.expect("q, k and v are all there"));
        let mut whole = parts.next().expect("q comes first");
        for part in parts {
            whole.shape[0] += part.shape[0];
            whole.bytes.extend(part.bytes);
        }
        original.insert(name, whole);
    }
    original
}

pub(crate) fn serialize(tensors: &Tensors) -> Vec<u8> {
    let views = tensors.iter().map(|(name, stored)| {
        let view = TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes);
        (name.as_str(), view.expect("bytes match the shape"))
    });
    safetensors::serialize(views, None).expect("a small file")
}

pub(crate) fn write_configs(dir: &Path, config: &Value) {
    std::fs::write(dir.join("config.json"), config.to_string()).expect("the directory is writable");
    std::fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": [1, 2]}"#).expect("writable");
}

/// A directory with config and one file of weights.
pub(crate) fn write(dir: &Path, config: &Value, tensors: &Tensors) {
    write_configs(dir, config);
    std::fs::write(dir.join("model.safetensors"), serialize(tensors)).expect("the directory is writable");
}

/// Spreads the tensors over files named as the released ones are: `-of-` is one less than the number of files.
pub(crate) fn write_sharded(dir: &Path, config: &Value, tensors: Tensors, num_files: usize) {
    write_configs(dir, config);
    let mut shards: Vec<Tensors> = (0..num_files).map(|_| Tensors::new()).collect();
    let mut weight_map = serde_json::Map::new();
    let file_name = |shard: usize| format!("model-{shard:05}-of-{:05}.safetensors", num_files - 1);
    for (i, (name, stored)) in tensors.into_iter().enumerate() {
        weight_map.insert(name.clone(), json!(file_name(i % num_files)));
        shards[i % num_files].insert(name, stored);
    }
    for (shard, tensors) in shards.iter().enumerate() {
        std::fs::write(dir.join(file_name(shard)), serialize(tensors)).expect("the directory is writable");
    }
    let index = json!({ "metadata": { "total_size": 0 }, "weight_map": weight_map });
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("writable");
}

/// The embedded model's tensors, for writing them out again.
pub(crate) fn nano_tensors() -> Tensors {
    let nano = Checkpoint::embedded_nano();
    let mut tensors = tensors(&nano_config());
    for param in Param::all(nano.config()) {
        tensors.get_mut(&param.to_string()).expect("same model").bytes = nano.tensor(param).bytes().to_vec();
    }
    tensors
}
