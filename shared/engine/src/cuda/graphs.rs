//! Graphs of decode steps: one launch for the hundreds of kernels of a step.

use std::collections::BTreeMap;

use device::Graph;

/// Contexts up to which decode attention's work is spread, for batches small enough that contexts are split over
/// multiprocessors: a graph made for long contexts would launch mostly empty blocks on short ones.
const CONTEXT_CLASSES: [usize; 3] = [2 << 10, 8 << 10, 32 << 10];

/// What a graph is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GraphKey {
    /// Rows, padded ones included.
    pub(crate) rows: usize,
    /// Context for which decode attention spreads its work.
    pub(crate) max_context: usize,
}

/// A graph for each batch bucket and context class.
pub(crate) struct DecodeGraphs {
    graphs: BTreeMap<GraphKey, Graph>,
    max_rows: usize,
    max_context: usize,
    /// Rows beyond which contexts are not split.
    split_rows: usize,
}

impl DecodeGraphs {
    /// For batches of up to `max_rows`. `multiprocessors` and `kv_heads` tell when contexts are split: attention
    /// launches a block for each KV head of each row, and two of them share a multiprocessor.
    pub(crate) const fn new(max_rows: usize, max_context: usize, multiprocessors: usize, kv_heads: usize) -> Self {
        Self { graphs: BTreeMap::new(), max_rows, max_context, split_rows: 2 * multiprocessors / kv_heads }
    }

    /// The graph that runs `rows` rows with contexts up to `context`.
    pub(crate) fn key(&self, rows: usize, context: usize) -> GraphKey {
        let rows = bucket(rows).min(self.max_rows);
        let class = CONTEXT_CLASSES.into_iter().find(|class| rows <= self.split_rows && context <= *class);
        GraphKey { rows, max_context: class.unwrap_or(self.max_context).min(self.max_context) }
    }

    /// Every key that [`Self::key`] can yield.
    pub(crate) fn keys(&self) -> Vec<GraphKey> {
        let contexts = CONTEXT_CLASSES.into_iter().filter(|class| *class < self.max_context).chain([self.max_context]);
        let mut keys: Vec<GraphKey> = contexts
            .flat_map(|context| (1..=self.max_rows).map(move |rows| (rows, context)))
            .map(|(rows, context)| self.key(rows, context))
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    pub(crate) fn insert(&mut self, key: GraphKey, graph: Graph) {
        self.graphs.insert(key, graph);
    }

    pub(crate) fn get(&mut self, key: GraphKey) -> Option<&mut Graph> {
        self.graphs.get_mut(&key)
    }
}

/// Rows that a batch is padded to: none up to 16, where each costs weight traffic, then steps of an eighth to a
/// quarter.
fn bucket(rows: usize) -> usize {
    let step = match rows {
        0..=16 => 1,
        17..=32 => 4,
        33..=64 => 8,
        _ => 16,
    };
    rows.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_has_a_graph_not_much_larger() {
        let graphs = DecodeGraphs::new(100, 131_072, 132, 8);
        let keys = graphs.keys();
        for rows in 1..=100 {
            for context in [1, 2048, 2049, 131_072] {
                let key = graphs.key(rows, context);
                assert!(keys.contains(&key), "{key:?}");
                assert!((rows..=rows + rows / 4).contains(&key.rows) && key.max_context >= context, "{key:?}");
            }
        }
        assert_eq!(graphs.key(1, 100).max_context, 2048);
        assert_eq!(graphs.key(64, 100).max_context, 131_072);
        assert_eq!(graphs.key(99, 100).rows, 100);
    }

    #[test]
    fn short_models_have_one_class() {
        let graphs = DecodeGraphs::new(2, 1024, 132, 4);
        assert_eq!(graphs.keys(), [1, 2].map(|rows| GraphKey { rows, max_context: 1024 }));
    }
}
