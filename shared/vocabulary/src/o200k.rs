//! The built-in vocabulary: the ranks of o200k_base with the special tokens of o200k_harmony.

use std::io::Read;

use bpe::byte_pair_encoding::BytePairEncoding;
use types::TokenId;

/// gzip of: number of tokens (u32, little endian), a byte with the length of each token, the bytes of all tokens.
/// `examples/pack_o200k.rs` makes it; `data/README.md` says from what.
const PACKED: &[u8] = include_bytes!("../data/o200k_base.bin.gz");

/// Spreads the hashes of the 199,998 tokens without collision. Finding one takes longer than all the rest; a collision would be a
/// panic in [`pairs`], which every test of this vocabulary runs through.
const HASH_FACTOR: u64 = 760_715_876_526_296_803;

const START_OF_TEXT: TokenId = 199_998;
const END: TokenId = 201_088;

/// The unpacked table.
pub(super) fn token_table() -> Vec<u8> {
    let mut table = Vec::with_capacity(2_000_000);
    flate2::read::GzDecoder::new(PACKED).read_to_end(&mut table).expect("the table is part of the program");
    table
}

/// The tables of the encoder. Takes about a second.
pub(super) fn pairs(table: &[u8]) -> BytePairEncoding {
    BytePairEncoding::from_dictionary(tokens(table).map(<[u8]>::to_vec), Some(HASH_FACTOR))
}

/// The bytes of each token, in the order of the ranks.
fn tokens(table: &[u8]) -> impl Iterator<Item = &[u8]> {
    let (count, rest) = table.split_first_chunk().expect("the table begins with a count");
    let (lengths, mut bytes) = rest.split_at(u32::from_le_bytes(*count) as usize);
    lengths.iter().map(move |len| {
        let (token, tail) = bytes.split_at(usize::from(*len));
        bytes = tail;
        token
    })
}

/// The special tokens, by number.
pub(super) fn special_tokens() -> Vec<(TokenId, String)> {
    let name = |id| match id {
        START_OF_TEXT => "<|startoftext|>".to_owned(),
        199_999 => "<|endoftext|>".to_owned(),
        200_002 => "<|return|>".to_owned(),
        200_003 => "<|constrain|>".to_owned(),
        200_005 => "<|channel|>".to_owned(),
        200_006 => "<|start|>".to_owned(),
        200_007 => "<|end|>".to_owned(),
        200_008 => "<|message|>".to_owned(),
        200_012 => "<|call|>".to_owned(),
        200_018 => "<|endofprompt|>".to_owned(),
        reserved => format!("<|reserved_{reserved}|>"),
    };
    (START_OF_TEXT..END).map(|id| (id, name(id))).collect()
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    /// The hash by which the published file `o200k_base.tiktoken` is known.
    const PUBLISHED: &str = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d";

    #[test]
    fn table_is_the_published_file() {
        let mut file = String::new();
        for (rank, token) in super::tokens(&super::token_table()).enumerate() {
            file.push_str(&format!("{} {rank}\n", base64(token)));
        }
        let digest: String = Sha256::digest(&file).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, PUBLISHED);
    }

    fn base64(bytes: &[u8]) -> String {
        const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for chunk in bytes.chunks(3) {
            let group =
                chunk.iter().fold(0_u32, |group, byte| group << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
            for place in 0..4 {
                let six = (group >> (18 - 6 * place)) as usize & 63;
                text.push(if place <= chunk.len() { char::from(ALPHABET[six]) } else { '=' });
            }
        }
        text
    }
}
