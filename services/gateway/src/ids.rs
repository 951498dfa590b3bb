//! Names that one response gives to itself and its parts, all derived from one random key.

/// The random key of a response. Equal keys give equal names, so the pure layers need no randomness of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseKey(u128);

impl ResponseKey {
    /// Wraps 128 random bits.
    #[must_use]
    pub const fn new(random: u128) -> Self {
        Self(random)
    }

    /// Draws a key. Version 7: keys sort by time, which databases of clients like.
    #[must_use]
    pub fn draw() -> Self {
        Self(uuid::Uuid::now_v7().as_u128())
    }

    /// Name of a chat completion.
    #[must_use]
    pub fn chat_id(self) -> String {
        format!("chatcmpl-{:032x}", self.0)
    }

    /// Name of a text completion.
    #[must_use]
    pub fn completion_id(self) -> String {
        format!("cmpl-{:032x}", self.0)
    }

    /// Name of a response of the Responses API.
    #[must_use]
    pub fn response_id(self) -> String {
        format!("resp_{:032x}", self.0)
    }

    /// Name of an output item of the Responses API; `prefix` is `rs`, `msg` or `fc`.
    #[must_use]
    pub fn item_id(self, prefix: &str, output_index: u32) -> String {
        format!("{prefix}_{:032x}{output_index:04x}", self.0)
    }

    /// Name of the `index`-th tool call of answer `choice`.
    #[must_use]
    pub fn call_id(self, choice: u32, index: u32) -> String {
        format!("call_{:032x}{choice:02x}{index:04x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_differ() {
        let key = ResponseKey::new(0xabc);
        assert_eq!(key.chat_id(), "chatcmpl-00000000000000000000000000000abc");
        assert_ne!(key.call_id(0, 1), key.call_id(1, 0));
        assert_ne!(ResponseKey::draw(), ResponseKey::draw());
    }
}
