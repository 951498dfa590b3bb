//! What day it is: for prompts, and for what is kept for a time.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds since 1970, in UTC.
#[must_use]
pub fn unix_secs() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// The day, in UTC, of a time in seconds since the epoch: `YYYY-MM-DD`.
///
/// Years are counted from March, so that the leap day is the last one and every month's start is a linear function of
/// its number (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
#[must_use]
pub fn utc_date(unix_secs: u64) -> String {
    const DAYS_PER_ERA: u64 = 146_097;
    // 0000-03-01 lies 719468 days before 1970-01-01.
    let days = unix_secs / 86_400 + 719_468;
    let (era, day_of_era) = (days / DAYS_PER_ERA, days % DAYS_PER_ERA);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::utc_date;

    #[test]
    fn days_around_the_edges() {
        for (unix_secs, date) in [
            (0, "1970-01-01"),
            (86_399, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_751_068_800, "2025-06-28"),
            (1_767_225_599, "2025-12-31"),
            (1_767_225_600, "2026-01-01"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(utc_date(unix_secs), date, "{unix_secs}");
        }
    }
}
