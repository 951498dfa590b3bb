//! Name and vocabulary of a model whose weights are elsewhere.

use model::{Checkpoint, CheckpointError, ModelIdentity, sha256_hex};
use tempfile::tempdir;

use crate::support::{nano_config, original_config, tensors, tiny_config, write};

#[test]
fn no_weights_are_needed_and_a_checkpoint_has_the_same_identity() {
    let dir = tempdir().expect("a temporary directory");
    let model = dir.path().join("gpt-oss-20b");
    std::fs::create_dir(&model).expect("the directory is ours");
    write(&model, &tiny_config(), &tensors(&tiny_config()));
    std::fs::write(model.join("tokenizer.json"), "{}").expect("the directory is ours");
    std::fs::write(model.join("generation_config.json"), r#"{"eos_token_id": [1]}"#).expect("the directory is ours");
    let of_checkpoint = Checkpoint::open(&model).expect("a sound checkpoint").fingerprint("unused");
    for file in ["model.safetensors", "generation_config.json"] {
        std::fs::remove_file(model.join(file)).expect("it was written");
    }
    assert!(Checkpoint::open(&model).is_err());
    let identity = ModelIdentity::open(&model).expect("config.json and tokenizer.json are enough");
    assert_eq!((identity.name(), identity.vocab_size()), ("gpt-oss-20b", 64));
    assert_eq!(identity.tokenizer_json(), Some(b"{}".as_slice()));
    assert_eq!(identity.fingerprint("unused"), of_checkpoint);
    assert_eq!(of_checkpoint.tokenizer_sha256, sha256_hex(b"{}"));
}

#[test]
fn the_original_layout_takes_the_tokenizer_beside_it() {
    let dir = tempdir().expect("a temporary directory");
    let original = dir.path().join("gpt-oss-120b/original");
    std::fs::create_dir_all(&original).expect("the directory is ours");
    let config = original_config(&nano_config()).to_string();
    std::fs::write(original.join("config.json"), config).expect("the directory is ours");
    let without = ModelIdentity::open(&original).expect("a tokenizer is optional");
    assert_eq!((without.name(), without.tokenizer_json()), ("gpt-oss-120b", None));
    assert_eq!(without.fingerprint("builtin").tokenizer_sha256, "builtin");
    std::fs::write(dir.path().join("gpt-oss-120b/tokenizer.json"), "[]").expect("the directory is ours");
    let identity = ModelIdentity::open(&original).expect("config.json is there");
    assert_eq!(identity.tokenizer_json(), Some(b"[]".as_slice()));
}

#[test]
fn the_embedded_one_is_that_of_the_embedded_checkpoint() {
    assert_eq!(ModelIdentity::embedded_nano().fingerprint("unused"), Checkpoint::embedded_nano().fingerprint("unused"));
}

#[test]
fn a_directory_without_config_is_refused_by_name() {
    let dir = tempdir().expect("a temporary directory");
    let error = ModelIdentity::open(dir.path()).expect_err("nothing is there");
    assert!(matches!(&error, CheckpointError::Io { file, .. } if file.ends_with("config.json")), "{error}");
}
