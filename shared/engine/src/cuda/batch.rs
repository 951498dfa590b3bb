//! The rows of a step that are the rank's attention group's, as arrays: first the rows of one token, which decode
//! attention takes together, then the longer ones, chunk by chunk. Slots are numbered within the group.

use std::ops::Range;
use std::sync::Arc;

use kernels::SampleRow;
use scheduler::PendingMask;
use scheduler::plan::{RowOutputKind, RowTokens, StepPlan, StepRow};
use types::{DpGroup, PageGroup, SlotGroups, SlotId};

use super::group_tokens::GroupTokens;
use super::kv_cache::RankCache;
use crate::EngineError;

/// A row of several tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) slot: usize,
    /// Position of its first token.
    pub(crate) start: usize,
    /// Its tokens, within the batch.
    pub(crate) tokens: Range<usize>,
}

/// What the device shall do with the rows of a plan.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// Token ids; `-1 - i` is the token of row `i` of the draw before.
    pub(crate) tokens: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    /// Slot of each token.
    pub(crate) slots: Vec<i32>,
    /// Keys that a decode row sees, its own included; 0 for tokens of chunks.
    pub(crate) contexts: Vec<i32>,
    /// The first tokens, each a row of its own.
    pub(crate) decode_rows: usize,
    pub(crate) chunks: Vec<Chunk>,
    /// Tokens whose logits are drawn from, ascending, and how.
    pub(crate) sample_tokens: Vec<usize>,
    pub(crate) sample_rows: Vec<SampleRow>,
    /// Grammar masks, and the draws that wait for them.
    pub(crate) masks: Vec<(usize, Arc<PendingMask>)>,
    /// For each row of the plan: its draw, if it samples.
    pub(crate) draws: Vec<Option<usize>>,
    /// For each row of the plan: tokens whose logits it yields.
    pub(crate) logits: Vec<Range<usize>>,
    /// Longest context of a decode row.
    pub(crate) max_context: usize,
    /// Whether any row publishes its KV.
    pub(crate) publishes: bool,
    /// The tokens of all attention groups.
    pub(crate) groups: GroupTokens,
    /// Of a batch that was padded, for each token of all groups: whether it is one. Left empty with one group, where
    /// padding repeats a token.
    pub(crate) present: Vec<i32>,
    /// Whether every row of the plan, those of other groups included, decodes one token and samples the next.
    decodes_only: bool,
}

/// What a batch is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// All slots, and whose they are.
    pub(crate) slots: SlotGroups,
    /// The rank's attention group.
    pub(crate) group: DpGroup,
    pub(crate) max_step_tokens: usize,
    pub(crate) vocab_size: usize,
    pub(crate) window: usize,
    /// Positions that there are angles for.
    pub(crate) max_context: usize,
}

impl Limits {
    /// The place of a slot within the rank's attention group; `None` if it is another group's.
    pub(crate) fn own(&self, slot: SlotId) -> Option<usize> {
        (self.slots.of(slot) == self.group).then(|| (slot.0 % self.slots.per_group()) as usize)
    }

    /// All slots.
    pub(crate) const fn max_slots(&self) -> usize {
        (self.slots.dp() * self.slots.per_group()) as usize
    }
}

/// What the rank knows of its slots.
pub(crate) trait Slots {
    /// The entry of [`Batch::tokens`] that stands for the last token sampled in a slot; `None` if there is none.
    fn last_token(&self, slot: usize) -> Option<i32>;

    /// How the next token of a slot is drawn; `None` if it is not bound. Asked once for each row that samples.
    fn next_draw(&mut self, slot: usize) -> Option<SampleRow>;
}

impl Batch {
    /// Orders a plan's rows, whose slots and pages have been applied.
    ///
    /// # Errors
    /// [`EngineError::Plan`] if a row has no tokens or unknown ones, if its slot does not exist, appears twice or lacks
    /// what the row needs, or if a position has no page.
    pub(crate) fn new(
        plan: &StepPlan,
        slots: &mut dyn Slots,
        cache: &RankCache,
        limits: &Limits,
    ) -> Result<Self, EngineError> {
        Self::arrange(plan, slots, &|slot, group, positions| cache.covers(slot, group, positions), limits)
            .map_err(|reason| EngineError::Plan { step: plan.step, reason })
    }

    fn arrange(
        plan: &StepPlan,
        slots: &mut dyn Slots,
        covers: &dyn Fn(usize, PageGroup, &Range<usize>) -> bool,
        limits: &Limits,
    ) -> Result<Self, String> {
        let num_rows = plan.rows.len();
        let mut batch =
            Self { draws: vec![None; num_rows], logits: vec![0..0; num_rows], decodes_only: true, ..Self::default() };
        let mut seen = vec![false; limits.max_slots()];
        let mut counts = vec![0; limits.slots.dp() as usize];
        let (mut single, mut several) = (Vec::new(), Vec::new());
        for (idx, row) in plan.rows.iter().enumerate() {
            check_row(row, limits)?;
            if std::mem::replace(&mut seen[row.slot.0 as usize], true) {
                return Err(format!("slot {} has two rows", row.slot.0));
            }
            let (len, samples) = (row.tokens.len(), row.output == RowOutputKind::Sample);
            counts[limits.slots.of(row.slot).0 as usize] += len;
            batch.decodes_only &= len == 1 && samples && !row.publish_kv;
            let Some(slot) = limits.own(row.slot) else { continue };
            check_pages(row, slot, covers, limits)?;
            if len == 1 { single.push((idx, slot, row)) } else { several.push((idx, slot, row)) }
        }
        for (idx, slot, row) in single {
            let first = batch.push(row, slot, slots)?;
            batch.contexts[first] = row.position as i32 + 1;
            batch.max_context = batch.max_context.max(row.position as usize + 1);
            batch.decode_rows += 1;
            batch.want(idx, row, slot, first..first + 1, slots)?;
        }
        for (idx, slot, row) in several {
            let first = batch.push(row, slot, slots)?;
            let tokens = first..batch.tokens.len();
            batch.chunks.push(Chunk { slot, start: row.position as usize, tokens: tokens.clone() });
            batch.want(idx, row, slot, tokens, slots)?;
        }
        batch.groups = GroupTokens::new(&counts, limits.group.0 as usize);
        if batch.groups.all() > limits.max_step_tokens {
            return Err(format!("{} tokens, at most {} are allowed", batch.groups.all(), limits.max_step_tokens));
        }
        Ok(batch)
    }

    /// A plain decode batch of `rows` rows in each of `groups` attention groups, for a graph: what its rows are is read
    /// when that runs.
    pub(crate) fn of_graph(rows: usize, groups: usize, own: DpGroup) -> Self {
        let groups = GroupTokens::new(&vec![rows; groups], own.0 as usize);
        Self {
            tokens: vec![0; rows],
            decode_rows: rows,
            sample_tokens: (0..rows).collect(),
            present: if groups.groups() > 1 { vec![1; groups.all()] } else { Vec::new() },
            groups,
            ..Self::default()
        }
    }

    /// Appends a row's tokens; yields the place of the first.
    fn push(&mut self, row: &StepRow, slot: usize, slots: &dyn Slots) -> Result<usize, String> {
        let first = self.tokens.len();
        match &row.tokens {
            RowTokens::Known(tokens) => self.tokens.extend(tokens.iter().map(|token| *token as i32)),
            RowTokens::LastSampled => {
                let token = slots.last_token(slot);
                self.tokens.push(token.ok_or_else(|| format!("slot {} has sampled no token", row.slot.0))?);
            }
        }
        let len = self.tokens.len();
        self.positions.extend((row.position as i32..).take(len - first));
        self.slots.resize(len, slot as i32);
        self.contexts.resize(len, 0);
        self.publishes |= row.publish_kv;
        Ok(first)
    }

    fn want(
        &mut self,
        idx: usize,
        row: &StepRow,
        slot: usize,
        tokens: Range<usize>,
        slots: &mut dyn Slots,
    ) -> Result<(), String> {
        let last = tokens.end - 1;
        match row.output {
            RowOutputKind::None => {}
            RowOutputKind::LastLogits => self.logits[idx] = last..last + 1,
            RowOutputKind::AllLogits => self.logits[idx] = tokens,
            RowOutputKind::Sample => {
                let draw = slots.next_draw(slot);
                self.sample_rows.push(draw.ok_or_else(|| format!("slot {} samples but is not bound", row.slot.0))?);
                let draw = self.sample_tokens.len();
                self.draws[idx] = Some(draw);
                self.masks.extend(row.mask.iter().map(|mask| (draw, mask.clone())));
                self.sample_tokens.push(last);
            }
        }
        Ok(())
    }

    /// Whether the step is what a graph does: every row, of whatever group, decodes one token and samples the next.
    pub(crate) fn is_plain_decode(&self) -> bool {
        self.groups.all() > 0 && self.decodes_only
    }

    /// Fills a plain decode batch up to `rows` rows in every group.
    ///
    /// With one group, added rows repeat the one with the shortest context, so they visit experts and pages that are read
    /// anyway, and write to the cache what it writes. With several, they are marked as absent and visit no expert, so what
    /// they write would be something else: they are the first position of slot `idle`, which no sequence has.
    pub(crate) fn pad(&mut self, rows: usize, idle: usize) {
        let is_one_group = self.groups.groups() == 1;
        if !is_one_group {
            let present = |count: usize| (0..rows).map(move |row| i32::from(row < count));
            self.present = self.groups.counts().flat_map(present).collect();
        }
        self.groups = self.groups.padded(rows);
        let repeated = (0..self.decode_rows).min_by_key(|row| self.contexts[*row]).filter(|_| is_one_group);
        let idle = [0, 0, idle as i32, 1];
        let parts = [&mut self.tokens, &mut self.positions, &mut self.slots, &mut self.contexts];
        for (part, idle) in parts.into_iter().zip(idle) {
            let added = repeated.map_or(idle, |row| part[row]);
            part.resize(rows, added);
        }
        if is_one_group {
            self.sample_tokens.extend(self.sample_rows.len()..rows);
            self.sample_rows.resize(rows, SampleRow::default());
        }
        self.decode_rows = rows;
        self.max_context = self.max_context.max(1);
    }
}

fn check_row(row: &StepRow, limits: &Limits) -> Result<(), String> {
    let slot = row.slot.0;
    if slot as usize >= limits.max_slots() {
        return Err(format!("slot {slot} does not exist"));
    }
    if row.tokens.is_empty() {
        return Err(format!("the row of slot {slot} has no tokens"));
    }
    if let RowTokens::Known(tokens) = &row.tokens
        && let Some(token) = tokens.iter().find(|token| **token as usize >= limits.vocab_size)
    {
        return Err(format!("slot {slot} has token {token}, the vocabulary {} tokens", limits.vocab_size));
    }
    Ok(())
}

/// `slot`: the row's, within the rank's group.
fn check_pages(
    row: &StepRow,
    slot: usize,
    covers: &dyn Fn(usize, PageGroup, &Range<usize>) -> bool,
    limits: &Limits,
) -> Result<(), String> {
    let position = row.position as usize;
    let end = position + row.tokens.len();
    // The last page may reach further.
    if end > limits.max_context {
        return Err(format!("slot {} reaches position {end}, at most {} are allowed", row.slot.0, limits.max_context));
    }
    let window = (position + 1).saturating_sub(limits.window)..end;
    if !covers(slot, PageGroup::Full, &(0..end)) || !covers(slot, PageGroup::Window, &window) {
        return Err(format!("slot {} lacks pages for positions up to {end}", row.slot.0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight slots, for `dp` groups.
    fn limits(dp: u32, group: u32) -> Limits {
        let slots = SlotGroups::new(8, dp).expect("the slots divide");
        Limits { slots, group: DpGroup(group), max_step_tokens: 16, vocab_size: 100, window: 4, max_context: 40 }
    }

    /// Slot `n` last sampled token `n + 10`, but slot 3 is unbound and slot 2's token is still row 5 of the draw
    /// before.
    struct Fixed;

    impl Slots for Fixed {
        fn last_token(&self, slot: usize) -> Option<i32> {
            match slot {
                2 => Some(-6),
                3 => None,
                _ => Some(slot as i32 + 10),
            }
        }

        fn next_draw(&mut self, slot: usize) -> Option<SampleRow> {
            (slot != 3).then(|| SampleRow { seed: slot as u64, ..SampleRow::default() })
        }
    }

    fn row(slot: u32, position: u32, tokens: RowTokens, output: RowOutputKind) -> StepRow {
        StepRow { slot: SlotId(slot), position, tokens, output, publish_kv: false, mask: None }
    }

    fn known(tokens: &[u32]) -> RowTokens {
        RowTokens::Known(tokens.to_vec())
    }

    fn arrange(rows: Vec<StepRow>) -> Result<Batch, String> {
        arrange_for(rows, &limits(1, 0))
    }

    fn arrange_for(rows: Vec<StepRow>, limits: &Limits) -> Result<Batch, String> {
        let plan = StepPlan { rows, ..StepPlan::default() };
        Batch::arrange(&plan, &mut Fixed, &|_, _, positions| positions.end <= 32, limits)
    }

    #[test]
    fn single_tokens_come_first_and_outputs_follow_the_plan() {
        let batch = arrange(vec![
            row(1, 7, known(&[3, 4, 5]), RowOutputKind::Sample),
            row(2, 9, RowTokens::LastSampled, RowOutputKind::Sample),
            row(4, 0, known(&[6, 7]), RowOutputKind::AllLogits),
            row(5, 2, known(&[8]), RowOutputKind::LastLogits),
        ])
        .unwrap();
        assert_eq!(batch.tokens, [-6, 8, 3, 4, 5, 6, 7]);
        assert_eq!(batch.positions, [9, 2, 7, 8, 9, 0, 1]);
        assert_eq!(batch.slots, [2, 5, 1, 1, 1, 4, 4]);
        assert_eq!(batch.contexts, [10, 3, 0, 0, 0, 0, 0]);
        assert_eq!((batch.decode_rows, batch.max_context), (2, 10));
        assert_eq!(batch.chunks[1], Chunk { slot: 4, start: 0, tokens: 5..7 });
        assert_eq!(batch.sample_tokens, [0, 4]);
        assert_eq!(batch.draws, [Some(1), Some(0), None, None]);
        assert_eq!(batch.logits, [0..0, 0..0, 5..7, 1..2]);
        assert!(!batch.is_plain_decode());
    }

    #[test]
    fn padding_repeats_the_shortest_row_and_draws_nothing_of_it() {
        let mut batch = arrange(vec![decode(1, 20), decode(2, 5), decode(4, 9)]).unwrap();
        assert!(batch.is_plain_decode());
        batch.pad(5, 8);
        assert_eq!(batch.tokens, [11, -6, 14, -6, -6]);
        assert!(batch.present.is_empty());
        assert_eq!(batch.contexts, [21, 6, 10, 6, 6]);
        assert_eq!(batch.sample_tokens, [0, 1, 2, 3, 4]);
        assert_eq!(batch.sample_rows[3..], [SampleRow::default(); 2]);
        assert_eq!(batch.draws, [Some(0), Some(1), Some(2)]);
    }

    fn decode(slot: u32, position: u32) -> StepRow {
        row(slot, position, RowTokens::LastSampled, RowOutputKind::Sample)
    }

    #[test]
    fn a_group_takes_its_own_rows_and_counts_all() {
        // Slots 4 to 7 are the second group's, its 0 to 3.
        let rows = || vec![decode(0, 4), row(5, 2, known(&[8, 9]), RowOutputKind::Sample), decode(6, 7)];
        let [first, second] = [0, 1].map(|group| arrange_for(rows(), &limits(2, group)).unwrap());
        assert_eq!((&first.tokens[..], &first.slots[..]), (&[10][..], &[0][..]));
        assert_eq!((first.groups.own(), second.groups.own()), (0..1, 1..4));
        assert_eq!((&second.tokens[..], &second.slots[..]), (&[-6, 8, 9][..], &[2, 1, 1][..]));
        assert_eq!(second.draws, [None, Some(1), Some(0)]);
        assert_eq!(second.chunks, [Chunk { slot: 1, start: 2, tokens: 1..3 }]);
        assert!(!first.is_plain_decode() && !second.is_plain_decode(), "one row of any group has two tokens");
    }

    #[test]
    fn all_groups_are_padded_to_one_size_with_idle_rows() {
        let rows = || vec![decode(4, 20), decode(5, 5)];
        let [mut first, mut second] = [0, 1].map(|group| arrange_for(rows(), &limits(2, group)).unwrap());
        assert!(first.is_plain_decode() && second.is_plain_decode());
        assert_eq!((first.groups.most(), second.groups.most()), (2, 2));
        for batch in [&mut first, &mut second] {
            batch.pad(3, 4);
            assert_eq!(batch.present, [0, 0, 0, 1, 1, 0]);
        }
        assert_eq!((&first.slots[..], &first.contexts[..]), (&[4; 3][..], &[1; 3][..]));
        assert_eq!((&first.tokens[..], first.decode_rows, first.groups.own()), (&[0; 3][..], 3, 0..3));
        assert!(first.sample_tokens.is_empty() && first.sample_rows.is_empty());
        // Not a row repeated: without its experts, that would write other keys to its place.
        assert_eq!((&second.slots[..], &second.contexts[..]), (&[0, 1, 4][..], &[21, 6, 1][..]));
        assert_eq!((second.sample_rows.len(), second.sample_tokens.len(), second.groups.own()), (2, 2, 3..6));
    }

    #[test]
    fn rows_of_other_groups_are_checked_but_for_their_pages() {
        let own = || decode(0, 4);
        let beyond = arrange_for(vec![own(), row(4, 40, known(&[1]), RowOutputKind::None)], &limits(2, 0));
        assert!(beyond.is_ok(), "group 1 knows its pages");
        let twice = arrange_for(vec![own(), decode(4, 1), decode(4, 2)], &limits(2, 0)).map(drop).unwrap_err();
        assert!(twice.contains("two rows"), "{twice}");
        let long = arrange_for(vec![own(), row(4, 0, known(&[1; 16]), RowOutputKind::None)], &limits(2, 0));
        assert!(long.map(drop).unwrap_err().contains("17 tokens, at most 16"));
    }

    #[test]
    fn pages_may_reach_further_than_contexts_do() {
        let limits = Limits { max_context: 30, ..limits(1, 0) };
        let last =
            |tokens: &[u32]| arrange_for(vec![row(0, 29, known(tokens), RowOutputKind::None)], &limits).map(drop);
        assert_eq!(last(&[1]), Ok(()));
        let error = last(&[1, 2]).unwrap_err();
        assert!(error.contains("slot 0 reaches position 31, at most 30"), "{error}");
    }

    #[test]
    fn a_row_that_cannot_be_is_named() {
        let cases = [
            (vec![row(8, 0, known(&[1]), RowOutputKind::None)], "slot 8 does not exist"),
            (vec![row(0, 0, known(&[]), RowOutputKind::None)], "no tokens"),
            (vec![row(0, 0, known(&[100]), RowOutputKind::None)], "token 100"),
            (vec![row(0, 31, known(&[1, 2]), RowOutputKind::None)], "lacks pages"),
            (vec![row(3, 0, RowTokens::LastSampled, RowOutputKind::None)], "slot 3 has sampled no token"),
            (vec![row(3, 0, known(&[1]), RowOutputKind::Sample)], "slot 3 samples but is not bound"),
            (vec![row(0, 0, known(&[1; 17]), RowOutputKind::None)], "17 tokens, at most 16"),
            (
                vec![row(0, 0, known(&[1]), RowOutputKind::None), row(0, 1, known(&[1]), RowOutputKind::None)],
                "two rows",
            ),
        ];
        for (rows, reason) in cases {
            let error = arrange(rows).map(drop).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
