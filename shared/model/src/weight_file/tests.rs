use proptest::prelude::*;

use super::*;

fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 7);
    file
}

fn problem(file: &[u8]) -> String {
    parse_header(file).expect_err("a damaged file").at(Path::new("w.safetensors")).to_string()
}

const TWO: &str = r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"U8","shape":[5],"data_offsets":[12,17]},"__metadata__":{"format":"pt"}}"#;

#[test]
fn reads_what_safetensors_writes() {
    let tensors = parse_header(&file(TWO, 17)).expect("a sound file");
    assert_eq!(tensors.len(), 2);
    let start = LENGTH_BYTES + TWO.len();
    assert_eq!((tensors["a"].range.clone(), &tensors["a"].shape), (start..start + 12, &vec![2, 3]));
    assert_eq!((tensors["b"].range.clone(), tensors["b"].dtype), (start + 12..start + 17, safetensors::Dtype::U8));
}

#[test]
fn damage_is_described() {
    assert!(problem(&[1, 2]).contains("has 2 bytes"));
    assert!(problem(&u64::MAX.to_le_bytes()).contains("states a header of 18446744073709551615 bytes"));
    assert!(problem(&file(TWO, 0)[..40]).contains("only 32 follow"));
    assert!(problem(&file("{]", 0)).contains("header is not valid"));
    assert!(problem(&file("[]", 0)).contains("header is not valid"));
    assert_eq!(
        problem(&file(TWO, 14)),
        format!(
            "w.safetensors: truncated: tensor b ends at byte {}, the file has {}",
            LENGTH_BYTES + TWO.len() + 17,
            LENGTH_BYTES + TWO.len() + 14
        )
    );
    assert!(problem(&file(TWO, 20)).contains("has 3 bytes after the last tensor"));
    let tampered = |from: &str, to: &str| problem(&file(&TWO.replacen(from, to, 1), 17));
    assert!(tampered("[12,17]", "[11,16]").contains("tensor b lies at bytes 11..16, the one before ends at 12"));
    assert!(tampered("[12,17]", "[13,18]").contains("overlap or gap"));
    assert!(tampered("[12,17]", "[12,11]").contains("overlap or gap"));
    assert!(tampered("[2,3]", "[2,4]").contains("tensor a is BF16 [2, 4] = 16 bytes, its range has 12"));
    assert!(tampered("[2,3]", "[4294967296,4294967296,4294967296]").contains("impossible shape"));
    assert!(tampered("BF16", "BF17").contains("header is not valid"));
    assert!(tampered(r#""b":"#, r#""a":"#).contains("tensor a is listed twice"));
    let huge = format!(r#"{{"a":{{"dtype":"U8","shape":[{0}],"data_offsets":[0,{0}]}}}}"#, usize::MAX / 8);
    assert!(problem(&file(&huge, 4)).contains("truncated: tensor a"));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    /// Whatever the bytes, the parser returns; what it accepts lies inside the file, piece by piece.
    #[test]
    fn corrupt_headers_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        len in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut bytes = file(TWO, 17);
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cut {
            bytes.truncate(len.index(bytes.len() + 1));
        }
        if let Ok(tensors) = parse_header(&bytes) {
            let covered: usize = tensors.values().map(|tensor| bytes[tensor.range.clone()].len()).sum();
            prop_assert!(covered + LENGTH_BYTES <= bytes.len());
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = parse_header(&bytes);
    }
}
