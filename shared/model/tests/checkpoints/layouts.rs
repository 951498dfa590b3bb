//! The same model in every arrangement that is accepted.

use std::path::Path;

use model::{Checkpoint, Param, ShardPlan, load_rank, sha256_hex};
use tempfile::tempdir;
use types::ParallelLayout;

use crate::support::{
    Tensors, nano_config, nano_tensors, original_config, tensors, tiny_config, to_original, write, write_sharded,
};

fn assert_is_nano(dir: &Path) {
    let nano = Checkpoint::embedded_nano();
    let opened = Checkpoint::open(dir).expect("an accepted arrangement");
    assert_eq!(opened.config(), nano.config());
    for param in Param::all(nano.config()) {
        assert!(opened.tensor(param).bytes() == nano.tensor(param).bytes(), "{param}");
        assert_eq!(opened.tensor(param).shape(), nano.tensor(param).shape(), "{param}");
    }
    assert_eq!(opened.weights_fingerprint(), nano.weights_fingerprint());
    let plan = ShardPlan::new(opened.config(), ParallelLayout { tp: 4, ep: 2, dp: 1 }, 3).expect("legal");
    let (ours, theirs) = [&opened, &nano].map(|from| load_rank(from, &plan, &|_, _| ()).expect("loads")).into();
    assert_eq!(*ours.layers[3].v.weight.values, *theirs.layers[3].v.weight.values);
    assert_eq!(*ours.layers[3].k.bias, *theirs.layers[3].k.bias);
    assert_eq!(ours.layers[2].experts[1].down.dequantize(), theirs.layers[2].experts[1].down.dequantize());
}

#[test]
fn the_embedded_model() {
    let nano = Checkpoint::embedded_nano();
    assert_eq!(nano.name(), "gpt-oss-nano");
    assert_eq!(nano.stop_token_ids(), [2020, 2017, 2030]);
    let tokenizer = nano.tokenizer_json().expect("nano has a tokenizer");
    let fingerprint = nano.fingerprint("unused");
    assert_eq!((fingerprint.model.as_str(), fingerprint.vocab_size), ("gpt-oss-nano", 2048));
    assert_eq!(fingerprint.tokenizer_sha256, sha256_hex(tokenizer));
    assert_eq!(fingerprint.tokenizer_sha256.len(), 64);
    assert_is_nano(&Path::new(env!("CARGO_MANIFEST_DIR")).join("gpt-oss-nano"));
}

#[test]
fn hugging_face_shards() {
    let dir = tempdir().expect("a temporary directory");
    write_sharded(dir.path(), &nano_config(), nano_tensors(), 3);
    assert_is_nano(dir.path());
    // Without the index the files themselves say what they hold.
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).expect("it was written");
    assert_is_nano(dir.path());
}

#[test]
fn original_in_one_file_and_in_several() {
    let dir = tempdir().expect("a temporary directory");
    let config = original_config(&nano_config());
    write(dir.path(), &config, &to_original(nano_tensors()));
    assert_is_nano(dir.path());
    let dir = tempdir().expect("a temporary directory");
    write_sharded(dir.path(), &config, to_original(nano_tensors()), 2);
    assert_is_nano(dir.path());
}

#[test]
fn original_folder_takes_name_and_files_from_its_parent() {
    let parent = tempdir().expect("a temporary directory");
    let model = parent.path().join("some-model");
    let original = model.join("original");
    std::fs::create_dir_all(&original).expect("writable");
    write(&original, &original_config(&tiny_config()), &to_original(tensors(&tiny_config())));
    std::fs::remove_file(original.join("generation_config.json")).expect("it was written");
    std::fs::write(model.join("generation_config.json"), r#"{"eos_token_id": 9}"#).expect("writable");
    std::fs::write(model.join("tokenizer.json"), "{}").expect("writable");
    let checkpoint = Checkpoint::open(&original).expect("an accepted arrangement");
    assert_eq!((checkpoint.name(), checkpoint.stop_token_ids()), ("some-model", [9].as_slice()));
    assert_eq!(checkpoint.fingerprint("unused").tokenizer_sha256, sha256_hex(b"{}"));
}

#[test]
fn fingerprint_without_a_tokenizer_is_the_callers() {
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors(&tiny_config()));
    let checkpoint = Checkpoint::open(dir.path()).expect("a sound checkpoint");
    assert!(checkpoint.tokenizer_json().is_none());
    assert_eq!(checkpoint.fingerprint("abc").tokenizer_sha256, "abc");
}

#[test]
fn weights_fingerprint_sees_one_changed_norm() {
    let mut changed = tensors(&tiny_config());
    let fingerprint = |tensors: &Tensors| {
        let dir = tempdir().expect("a temporary directory");
        write(dir.path(), &tiny_config(), tensors);
        Checkpoint::open(dir.path()).expect("a sound checkpoint").weights_fingerprint()
    };
    let before = fingerprint(&changed);
    assert_eq!(before, fingerprint(&changed));
    changed.get_mut("model.layers.1.input_layernorm.weight").expect("it is there").bytes[5] ^= 1;
    assert_ne!(before, fingerprint(&changed));
}

/// A header of odd length leaves bf16 values at odd addresses: they are copied instead of borrowed, and equal.
#[test]
fn unaligned_data_is_copied() {
    let dir = tempdir().expect("a temporary directory");
    write(dir.path(), &tiny_config(), &tensors(&tiny_config()));
    let aligned = Checkpoint::open(dir.path()).expect("a sound checkpoint");
    let other = tempdir().expect("a temporary directory");
    write(other.path(), &tiny_config(), &tensors(&tiny_config()));
    let file = other.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("it was written");
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) + 1;
    bytes[..8].copy_from_slice(&length.to_le_bytes());
    bytes.insert(8, b' ');
    std::fs::write(&file, bytes).expect("writable");
    let unaligned = Checkpoint::open(other.path()).expect("still a sound checkpoint");
    let plan = ShardPlan::new(aligned.config(), ParallelLayout::tp(2), 1).expect("legal");
    let (a, b) = [&aligned, &unaligned].map(|from| load_rank(from, &plan, &|_, _| ()).expect("loads")).into();
    assert!(a.head.values.is_mapped() && !b.head.values.is_mapped());
    assert_eq!(*a.head.values, *b.head.values);
    assert_eq!(*a.layers[1].o.weight.values, *b.layers[1].o.weight.values);
    assert_eq!(a.layers[1].experts[3].gate_up.dequantize(), b.layers[1].experts[3].gate_up.dequantize());
}
