//! Damaged files are refused or loaded, never more.

use model::{Checkpoint, ShardPlan, load_rank};
use proptest::prelude::*;
use tempfile::tempdir;
use types::ParallelLayout;

use crate::support::{serialize, tensors, tiny_config, write_configs};

/// Opens and loads the file as both ranks of two; the error's text, if there is one, has been formatted.
fn open_and_load(bytes: &[u8], config: &str) -> Result<(), String> {
    let dir = tempdir().expect("a temporary directory");
    write_configs(dir.path(), &tiny_config());
    std::fs::write(dir.path().join("config.json"), config).expect("writable");
    std::fs::write(dir.path().join("model.safetensors"), bytes).expect("writable");
    let checkpoint = Checkpoint::open(dir.path()).map_err(|error| error.to_string())?;
    let plans = ShardPlan::all(checkpoint.config(), ParallelLayout::tp(2)).map_err(|error| error.to_string())?;
    for plan in plans {
        load_rank(&checkpoint, &plan, &|_, _| ()).map_err(|error| error.to_string())?;
    }
    assert_eq!(checkpoint.weights_fingerprint().len(), 64);
    Ok(())
}

#[test]
fn the_undamaged_file_loads() {
    assert_eq!(open_and_load(&serialize(&tensors(&tiny_config())), &tiny_config().to_string()), Ok(()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    /// Edits fall on the header, where the structure is, twice out of three times.
    #[test]
    fn damaged_weights_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), 0u8..=255, 0..3), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = serialize(&tensors(&tiny_config()));
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        for (at, value, place) in edits {
            let at = at.index(if place == 0 { bytes.len() } else { header });
            bytes[at] = value;
        }
        if let Some(len) = cut {
            bytes.truncate(len.index(bytes.len()));
        }
        let _ = open_and_load(&bytes, &tiny_config().to_string());
    }

    /// Digits replaced by digits keep the header well-formed: offsets and shapes lie.
    #[test]
    fn lying_headers_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 1..4)) {
        let mut bytes = serialize(&tensors(&tiny_config()));
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
        let digits: Vec<usize> = (8..header).filter(|&at| bytes[at].is_ascii_digit()).collect();
        for (at, digit) in edits {
            bytes[digits[at.index(digits.len())]] = digit;
        }
        let _ = open_and_load(&bytes, &tiny_config().to_string());
    }

    #[test]
    fn damaged_configs_never_panic(edits in prop::collection::vec((any::<prop::sample::Index>(), b' '..=b'~'), 1..4)) {
        let bytes = serialize(&tensors(&tiny_config()));
        let mut config = tiny_config().to_string().into_bytes();
        for (at, value) in edits {
            let at = at.index(config.len());
            config[at] = value;
        }
        let config = String::from_utf8(config).expect("still ascii");
        let _ = open_and_load(&bytes, &config);
    }
}
