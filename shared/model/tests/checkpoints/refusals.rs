//! What is refused, and that the message says where and why.

use std::path::Path;

use model::{Checkpoint, CheckpointError, ShardPlan, load_rank};
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};
use types::ParallelLayout;

use crate::support::{
    Stored, Tensors, original_config, tensors, tiny_config, to_original, write, write_configs, write_sharded,
};

const GATE_UP: &str = "model.layers.1.mlp.experts.gate_up_proj";

/// Opens the tiny model after an edit; the message with the directory's name cut out.
fn refusal(edit: impl FnOnce(&mut Tensors)) -> String {
    let mut tensors = tensors(&tiny_config());
    edit(&mut tensors);
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors);
    message(&dir)
}

fn message(dir: &TempDir) -> String {
    let error = Checkpoint::open(dir.path()).expect_err("a broken checkpoint");
    error.to_string().replace(&format!("{}/", dir.path().display()), "")
}

fn stored(dtype: safetensors::Dtype, shape: &[usize], bytes: usize) -> Stored {
    Stored { dtype, shape: shape.to_vec(), bytes: vec![1; bytes] }
}

#[test]
fn missing_and_misnamed_tensors() {
    assert_eq!(
        refusal(|tensors| drop(tensors.remove("model.layers.0.self_attn.sinks"))),
        "model.safetensors: tensor model.layers.0.self_attn.sinks is missing (expected BF16 [2])"
    );
    let rename = |tensors: &mut Tensors| {
        let sinks = tensors.remove("model.layers.0.self_attn.sinks").expect("it is there");
        tensors.insert("model.layers.0.self_attn.sink".to_owned(), sinks);
    };
    assert_eq!(
        refusal(rename),
        "model.safetensors: tensor model.layers.0.self_attn.sinks is missing (expected BF16 [2]); \
         the unknown tensor model.layers.0.self_attn.sink is there"
    );
    let extra = |tensors: &mut Tensors| {
        for layer in [2, 3] {
            let name = format!("model.layers.{layer}.input_layernorm.weight");
            tensors.insert(name, stored(safetensors::Dtype::BF16, &[32], 64));
        }
    };
    assert_eq!(
        refusal(extra),
        "model.safetensors: tensor model.layers.2.input_layernorm.weight does not belong to the model that config.json \
         describes (2 such)"
    );
    let foreign = |tensors: &mut Tensors| {
        tensors.clear();
        tensors.insert("transformer.wte".to_owned(), stored(safetensors::Dtype::BF16, &[1], 2));
    };
    assert_eq!(refusal(foreign), "model.safetensors: none of 1 tensor names belongs to a gpt-oss model");
}

#[test]
fn wrong_shapes_and_dtypes() {
    let padded = stored(safetensors::Dtype::U8, &[4, 128, 2, 16], 4 * 128 * 2 * 16);
    assert_eq!(
        refusal(|tensors| drop(tensors.insert(format!("{GATE_UP}_blocks"), padded))),
        "model.safetensors: tensor model.layers.1.mlp.experts.gate_up_proj_blocks has shape [4, 128, 2, 16], expected \
         [4, 128, 1, 16]"
    );
    let norm = stored(safetensors::Dtype::F32, &[32], 128);
    assert_eq!(
        refusal(|tensors| drop(tensors.insert("model.norm.weight".to_owned(), norm))),
        "model.safetensors: tensor model.norm.weight is F32, expected BF16"
    );
}

#[test]
fn dequantised_experts() {
    let dequantise = |tensors: &mut Tensors| {
        for part in ["blocks", "scales"] {
            tensors.remove(&format!("{GATE_UP}_{part}")).expect("it is there");
        }
        tensors.insert(GATE_UP.to_owned(), stored(safetensors::Dtype::BF16, &[4, 32, 128], 4 * 32 * 128 * 2));
    };
    assert_eq!(
        refusal(dequantise),
        "model.safetensors: tensor model.layers.1.mlp.experts.gate_up_proj (BF16 [4, 32, 128]) is a dequantised expert \
         matrix; only MXFP4 checkpoints (blocks and scales) are supported"
    );
}

#[test]
fn truncated_and_empty_files() {
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors(&tiny_config()));
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).expect("it was written");
    std::fs::write(&file, &bytes[..bytes.len() - 1]).expect("writable");
    let cut = message(&dir);
    assert!(cut.starts_with("model.safetensors: truncated: tensor model.layers."), "{cut}");
    assert!(cut.ends_with(&format!("ends at byte {}, the file has {}", bytes.len(), bytes.len() - 1)), "{cut}");
    std::fs::write(&file, b"").expect("writable");
    assert!(message(&dir).starts_with("model.safetensors: "), "{}", message(&dir));
}

#[test]
fn nan_scales_name_their_place_and_only_their_owner_refuses() {
    let mut tensors = tensors(&tiny_config());
    let (expert, row, block) = (2, 17, 1);
    let down_scales = "model.layers.1.mlp.experts.down_proj_scales";
    tensors.get_mut(down_scales).expect("it is there").bytes[(expert * 32 + row) * 2 + block] = 255;
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).expect("scales are read by the rank that holds them");
    for layout in [ParallelLayout::tp(1), ParallelLayout::tp(2), ParallelLayout { tp: 2, ep: 2, dp: 1 }] {
        for plan in ShardPlan::all(checkpoint.config(), layout).expect("legal") {
            let holds_it = plan.experts.contains(&expert) && plan.units.contains(&(block * 32));
            match load_rank(&checkpoint, &plan, &|_, _| ()) {
                Err(error @ CheckpointError::NanScale { .. }) => {
                    assert!(holds_it, "{layout} rank {} read another rank's part", plan.rank);
                    let message = error.to_string().replace(&format!("{}/", dir.path().display()), "");
                    let expected = "model.safetensors: tensor model.layers.1.mlp.experts.down_proj_scales has scale byte 255 \
                                    (NaN) at [2, 17, 1]";
                    assert_eq!(message, expected);
                }
                Err(other) => panic!("{other}"),
                Ok(_) => assert!(!holds_it, "{layout} rank {} accepted a NaN scale", plan.rank),
            }
        }
    }
}

#[test]
fn original_layout_names_its_own_tensors() {
    let mut tensors = to_original(tensors(&tiny_config()));
    tensors.remove("block.1.attn.qkv.bias").expect("it is there");
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &original_config(&tiny_config()), &tensors);
    assert_eq!(message(&dir), "model.safetensors: tensor block.1.attn.qkv.bias is missing (expected BF16 [384])");
}

#[test]
fn directories_without_what_is_needed() {
    let dir = tempdir().expect("a temporary directory");
    assert_eq!(message(&dir), "config.json: cannot be read");
    write_configs(dir.path(), &tiny_config());
    assert!(message(&dir).ends_with(": no .safetensors file"), "{}", message(&dir));
    std::fs::create_dir(dir.path().join("original")).expect("writable");
    std::fs::write(dir.path().join("original/model.safetensors"), b"").expect("writable");
    assert!(message(&dir).ends_with("no .safetensors file; there are some in original"), "{}", message(&dir));
    std::fs::remove_file(dir.path().join("generation_config.json")).expect("it was written");
    assert!(message(&dir).contains("no generation_config.json"), "{}", message(&dir));
    let mut unsupported = tiny_config();
    unsupported["rope_scaling"]["rope_type"] = json!("linear");
    write_configs(dir.path(), &unsupported);
    assert_eq!(message(&dir), r#"config.json: rope_scaling.rope_type is "linear", supported is "yarn""#);
}

#[test]
fn indexes_that_do_not_match_their_files() {
    let with_index = |edit: &dyn Fn(&mut Value)| {
        let dir = tempdir().expect("a temporary directory");
        write_sharded(dir.path(), &tiny_config(), tensors(&tiny_config()), 2);
        let path = dir.path().join("model.safetensors.index.json");
        let mut index = serde_json::from_slice(&std::fs::read(&path).expect("written")).expect("json");
        edit(&mut index);
        std::fs::write(&path, index.to_string()).expect("writable");
        message(&dir).replace("model.safetensors.index.json: ", "index: ")
    };
    let swapped =
        with_index(&|index| index["weight_map"]["lm_head.weight"] = json!("model-00001-of-00001.safetensors"));
    assert_eq!(
        swapped,
        "index: says that tensor lm_head.weight is in model-00001-of-00001.safetensors, which does not have it"
    );
    let unlisted = with_index(&|index| {
        index["weight_map"].as_object_mut().expect("an object").remove("lm_head.weight");
    });
    assert_eq!(unlisted, "index: does not list tensor lm_head.weight of model-00000-of-00001.safetensors");
    let absent = with_index(&|index| index["weight_map"]["lm_head.weight"] = json!("model-7.safetensors"));
    assert_eq!(absent, "model-7.safetensors: cannot be read");
    let outside = with_index(&|index| index["weight_map"]["lm_head.weight"] = json!("../model.safetensors"));
    assert_eq!(outside, r#"index: weight_map names "../model.safetensors", which is no plain file name"#);
    assert!(with_index(&|index| index["weight_map"] = json!({})).starts_with("index: weight_map is empty"));
    assert!(with_index(&|index| *index = json!([])).starts_with("index: not a weight index"));
}

#[test]
fn the_same_tensor_twice() {
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors(&tiny_config()));
    copy(dir.path(), "model.safetensors", "other.safetensors");
    let twice = message(&dir);
    assert!(twice.ends_with("is both in model.safetensors and in other.safetensors"), "{twice}");
}

fn copy(dir: &Path, from: &str, to: &str) {
    std::fs::copy(dir.join(from), dir.join(to)).expect("writable");
}
