//! A damaged page told from damaged weights, by who has logits that are no numbers.
//!
//! A page is read by one sequence, or by those that begin alike, and the cache lets go of all its pages then: that sequence ends and may be
//! computed anew. Weights are everybody's, so a worker that goes on would refuse whatever it is given. It is the weights if in a step no row is
//! sound and several sequences are broken, or if sequences break one after the other, [`MOST_IN_SUCCESSION`] of them, and no row of any step
//! between is sound.

use crate::in_flight::StepMismatch;

/// Broken sequences without a sound row between them, from which on it is the weights. One that breaks wherever it is computed must not end
/// worker after worker, and a worker that computes one at a time must end at some time.
const MOST_IN_SUCCESSION: u32 = 3;

/// What was seen since the last sound row.
#[derive(Debug, Default)]
pub(crate) struct NumberWatch {
    broken: u32,
}

impl NumberWatch {
    /// A row of some step had a token.
    pub(crate) fn sound_row(&mut self) {
        self.broken = 0;
    }

    /// A step without a sound row ended `sequences` sequences whose logits are no numbers.
    ///
    /// # Errors
    /// [`StepMismatch::NotNumbers`] if it is the weights.
    pub(crate) fn broken_step(&mut self, step: u64, sequences: u32) -> Result<(), StepMismatch> {
        self.broken += sequences;
        if sequences > 1 || self.broken >= MOST_IN_SUCCESSION {
            return Err(StepMismatch::NotNumbers { step, sequences: self.broken });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Steps = &'static [(u32, bool)];

    #[test]
    fn it_is_the_weights_if_nothing_is_sound() {
        // Steps: sequences broken and whether some other row is sound; the step that shows that it is the weights, if one does.
        let cases: [(Steps, Option<usize>); 7] = [
            (&[(1, false), (0, true)], None),
            (&[(1, false), (1, false)], None),
            (&[(1, false), (1, false), (1, false)], Some(2)),
            (&[(1, false), (0, false), (1, false), (0, false), (1, false)], Some(4)),
            (&[(1, false), (1, false), (0, true), (1, false), (1, false)], None),
            (&[(2, false)], Some(0)),
            (&[(5, true), (5, true), (1, false)], None),
        ];
        for (steps, weights) in cases {
            let mut watch = NumberWatch::default();
            let ended = steps.iter().position(|&(broken, sound)| {
                if sound {
                    watch.sound_row();
                    return false;
                }
                watch.broken_step(7, broken).is_err()
            });
            assert_eq!(ended, weights, "{steps:?}");
        }
    }
}
