//! The deadline that gRPC carries beside a call.

use std::time::Duration;

use tonic::metadata::MetadataMap;

/// Time left by the caller's `grpc-timeout`: at most eight digits and a unit, as the gRPC specification has it. Anything else counts as
/// absent.
#[must_use]
pub fn from_metadata(metadata: &MetadataMap) -> Option<Duration> {
    let value = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3_600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read_as_the_specification_says() {
        for (value, want) in [
            ("1H", Some(Duration::from_secs(3_600))),
            ("2M", Some(Duration::from_secs(120))),
            ("30S", Some(Duration::from_secs(30))),
            ("99999999m", Some(Duration::from_millis(99_999_999))),
            ("5u", Some(Duration::from_micros(5))),
            ("0n", Some(Duration::ZERO)),
            ("999999999m", None),
            ("5", None),
            ("S", None),
            ("", None),
            ("+5S", None),
        ] {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", value.parse().unwrap());
            assert_eq!(from_metadata(&metadata), want, "{value}");
        }
    }
}
