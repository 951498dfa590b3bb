//! The KV of prompts that were here, for prompts that begin alike.
//!
//! There is a tree for each salt. A node is one page of full attention, found under its parent by the very tokens that the page holds, so a
//! path from the root spells a prompt, and nothing is found by a hash that could collide. Sliding-window layers forget, so a path alone is not
//! enough to go on from: a node may be a *boundary*, which has the window pages before its end as well. Only there can a prompt resume.
//!
//! Boundaries are kept where prompts are likely to go on or to part: at the last page end inside a prompt (the next turn of a conversation
//! begins with all of this one), and where a prompt was found to leave a path that has none there (what many prompts begin with gets one when
//! it comes for the second time, and is found from the third on).
//!
//! The cache has no size of its own. What it holds are pages that would be free otherwise: when pages are wanted, it lets go of those that were
//! used least recently and that no sequence reads; of boundaries first of those that a conversation has left behind. Time is a count of uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use types::{CacheSalt, PageGroup, PageId, TokenId};

use crate::cached_page::CachedPage;
use crate::page_pool::{NoPages, PagePools};
use crate::sequence::{PageDemand, SequencePages, SequenceReserve};
use crate::shape::PageShape;

/// A sequence's tokens, and who may share them.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    /// Only contexts with an equal one have anything in common.
    pub salt: &'a Option<CacheSalt>,
    /// Everything that is to be computed: the prompt, and behind it what was generated before. Not empty.
    pub tokens: &'a [TokenId],
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
}

/// How a sequence begins.
#[derive(Debug)]
pub struct Start {
    /// Its pages, those that are reused and those set aside.
    pub pages: SequencePages,
    /// Positions that need not be computed, whole pages of them: less than the context.
    pub reused_tokens: u32,
    /// Where boundaries are wanted, ascending: page ends behind those positions, for [`PrefixCache::keep_boundary`].
    pub boundaries: Vec<u32>,
}

/// What has happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixCounts {
    /// Tokens of contexts that began.
    pub looked_up_tokens: u64,
    /// Those of them that were reused.
    pub reused_tokens: u64,
    /// Boundaries kept.
    pub boundaries: u64,
    /// Pages of full attention that made room for others.
    pub evicted_full: u64,
    /// Boundaries that made room for others.
    pub evicted_boundaries: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct NodeId(u64);

#[derive(Debug, Clone)]
enum Parent {
    Root(Option<CacheSalt>),
    Node(NodeId),
}

/// By the tokens of their pages.
type Children = BTreeMap<Arc<[TokenId]>, NodeId>;

#[derive(Debug)]
struct Node {
    parent: Parent,
    tokens: Arc<[TokenId]>,
    page: CachedPage,
    boundary: Option<Boundary>,
    children: Children,
    /// When its page was used last.
    used: u64,
}

/// What makes a node a boundary.
#[derive(Debug)]
struct Boundary {
    /// The window pages of [`PageShape::context_pages`] at its end.
    window: Vec<CachedPage>,
    worth: Worth,
}

/// How much a boundary is worth keeping; the least goes first. Where a conversation went on, its new end takes the place of the old one, which
/// only a branch would need: otherwise one that goes on would outlast, turn by turn, the only boundaries of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Worth {
    is_end_or_branch: bool,
    /// When it was kept, or a sequence resumed there.
    used: u64,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixCache {
    shape: PageShape,
    pools: PagePools,
    roots: BTreeMap<Option<CacheSalt>, Children>,
    nodes: BTreeMap<NodeId, Node>,
    next_node: u64,
    /// Nodes without children, by their last use.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Boundaries, by what they are worth.
    boundaries: BTreeSet<(Worth, NodeId)>,
    uses: u64,
    counts: PrefixCounts,
}

impl PrefixCache {
    /// An empty cache of pages of `pools`.
    #[must_use]
    pub fn new(shape: PageShape, pools: PagePools) -> Self {
        Self {
            shape,
            pools,
            roots: BTreeMap::new(),
            nodes: BTreeMap::new(),
            next_node: 0,
            leaves: BTreeSet::new(),
            boundaries: BTreeSet::new(),
            uses: 0,
            counts: PrefixCounts::default(),
        }
    }

    /// Begins a sequence behind the last boundary of what is cached of it, one token before its end at the latest: something must be computed to
    /// sample from. `demand` says what a sequence of so many tokens sets aside; where pages are short, others' are let go of.
    ///
    /// # Errors
    /// [`NoPages`] if too few are free or unread. Nothing was let go of then.
    pub fn begin(&mut self, context: Context<'_>, demand: impl Fn(u32) -> PageDemand) -> Result<Start, NoPages> {
        let context_tokens = context.tokens.len() as u32;
        let path = self.walk(context, self.last_page_end(context_tokens));
        self.touch(&path);
        let hit = self.last_boundary(&path).filter(|hit| self.fits(hit, &demand(context_tokens - self.tokens(hit))));
        let reused_tokens = hit.map_or(0, |hit| self.tokens(hit));
        let boundaries = self.wanted(context, &path, reused_tokens);
        // From here on these pages are read, so they are not let go of for the others.
        let full: Vec<_> = hit.into_iter().flatten().map(|id| self.nodes[id].page.read()).collect();
        let boundary = hit.and_then(|hit| self.nodes[hit.last()?].boundary.as_ref());
        let window: Vec<_> = boundary.iter().flat_map(|boundary| &boundary.window).map(CachedPage::read).collect();
        let end = hit.and_then(|hit| hit.last().copied());
        let reserve = self.reserve(demand(context_tokens - reused_tokens))?;
        if let Some(end) = end {
            self.resume_at(end, !boundaries.is_empty());
        }
        let pages = if reused_tokens > 0 { reserve.resume(reused_tokens, full, window) } else { reserve.start() };
        self.counts.looked_up_tokens += u64::from(context_tokens);
        self.counts.reused_tokens += u64::from(reused_tokens);
        Ok(Start { pages, reused_tokens, boundaries })
    }

    /// Tokens that a sequence would reuse if it began now, unless the window pool is too small to resume there. Does not count as a use.
    #[must_use]
    pub fn cached_tokens(&self, context: Context<'_>) -> u32 {
        let path = self.walk(context, self.last_page_end(context.tokens.len() as u32));
        self.last_boundary(&path).map_or(0, |hit| self.tokens(hit))
    }

    /// Takes in the whole pages of the first `computed` positions of a context, whose steps are complete. Where the cache has a page already,
    /// the sequence keeps its own to itself.
    pub fn keep(&mut self, context: Context<'_>, pages: &mut SequencePages, computed: u32) {
        let mut parent = Parent::Root(context.salt.clone());
        for (tokens, page) in self.pages(context).zip(pages.seal_full(computed)) {
            let known = self.children(&parent).and_then(|children| children.get(tokens)).copied();
            parent = Parent::Node(known.unwrap_or_else(|| self.insert(parent, tokens, page.clone())));
        }
    }

    /// Makes the end of a page that was kept a boundary, with the sequence's own window pages, all of whose positions are computed. A sequence
    /// that `goes_on` to compute gets other pages in their place; if there are none to be had, there is no boundary.
    pub fn keep_boundary(&mut self, context: Context<'_>, pages: &mut SequencePages, at: u32, goes_on: bool) {
        let path = self.walk(context, at);
        let end = path.last().copied().filter(|_| self.tokens(&path) == at);
        let Some(id) = end.filter(|id| self.nodes[id].boundary.is_none()) else { return };
        let Some(window) = pages.seal_window(at) else { return };
        let window: Vec<&CachedPage> = window.collect();
        let lent = window.iter().filter(|page| page.is_sole()).count() as u32;
        let window = window.into_iter().cloned().collect();
        if goes_on {
            self.make_room(PageGroup::Window, lent);
            let Ok(spare) = self.pools.group(PageGroup::Window).reserve(lent) else { return };
            pages.add_window_spare(spare);
        }
        let worth = Worth { is_end_or_branch: true, used: self.uses };
        self.node(id).boundary = Some(Boundary { window, worth });
        self.boundaries.insert((worth, id));
        self.counts.boundaries += 1;
    }

    /// Lets go of everything, since something of it may be damaged. Who reads a page goes on reading it.
    pub fn clear(&mut self) {
        self.roots.clear();
        self.nodes.clear();
        self.leaves.clear();
        self.boundaries.clear();
    }

    /// What has happened since the start.
    #[must_use]
    pub fn counts(&self) -> PrefixCounts {
        self.counts
    }

    /// Pages that the cache holds.
    #[must_use]
    pub fn num_pages(&self, group: PageGroup) -> u32 {
        match group {
            PageGroup::Full => self.nodes.len() as u32,
            PageGroup::Window => self.window_pages().map(CachedPage::id).collect::<BTreeSet<PageId>>().len() as u32,
        }
    }

    /// The last page end before the last of `tokens` tokens.
    fn last_page_end(&self, tokens: u32) -> u32 {
        (tokens - 1) / self.shape.page_tokens * self.shape.page_tokens
    }

    fn pages<'a>(&self, context: Context<'a>) -> impl Iterator<Item = &'a [TokenId]> + use<'a> {
        context.tokens.chunks_exact(self.shape.page_tokens as usize)
    }

    /// Tokens that a path spells.
    fn tokens(&self, path: &[NodeId]) -> u32 {
        path.len() as u32 * self.shape.page_tokens
    }

    fn node(&mut self, id: NodeId) -> &mut Node {
        self.nodes.get_mut(&id).expect("ids of nodes that are gone are nowhere kept")
    }

    fn children(&self, parent: &Parent) -> Option<&Children> {
        match parent {
            Parent::Root(salt) => self.roots.get(salt),
            Parent::Node(id) => Some(&self.nodes[id].children),
        }
    }

    /// The nodes that spell the context's beginning, as far as they go and up to `end` tokens.
    fn walk(&self, context: Context<'_>, end: u32) -> Vec<NodeId> {
        let mut children = self.roots.get(context.salt);
        let steps = self.pages(context).take((end / self.shape.page_tokens) as usize);
        let nodes = steps.map_while(|tokens| {
            let id = children?.get(tokens)?;
            children = Some(&self.nodes[id].children);
            Some(*id)
        });
        nodes.collect()
    }

    /// A path up to its last boundary, if it has one.
    fn last_boundary<'a>(&self, path: &'a [NodeId]) -> Option<&'a [NodeId]> {
        path.iter().rposition(|id| self.nodes[id].boundary.is_some()).map(|last| &path[..=last])
    }

    /// A path is used now, all of it.
    fn touch(&mut self, path: &[NodeId]) {
        self.uses += 1;
        let used = self.uses;
        for id in path {
            let before = std::mem::replace(&mut self.node(*id).used, used);
            if self.leaves.remove(&(before, *id)) {
                self.leaves.insert((used, *id));
            }
        }
    }

    /// A sequence resumes at this boundary now, and leaves one further on or does not.
    fn resume_at(&mut self, id: NodeId, goes_on: bool) {
        let used = self.uses;
        let node = self.node(id);
        let worth = Worth { is_end_or_branch: node.children.len() > 1 || !goes_on, used };
        let Some(boundary) = &mut node.boundary else { return };
        let before = std::mem::replace(&mut boundary.worth, worth);
        self.boundaries.remove(&(before, id));
        self.boundaries.insert((worth, id));
    }

    /// Where a context that reuses `reused_tokens` of a path should leave boundaries.
    fn wanted(&self, context: Context<'_>, path: &[NodeId], reused_tokens: u32) -> Vec<u32> {
        let ends = [context.prompt_tokens, context.tokens.len() as u32].map(|tokens| self.last_page_end(tokens));
        let is_boundary = |at: u32| {
            let node = path.get((at / self.shape.page_tokens) as usize - 1);
            node.is_some_and(|id| self.nodes[id].boundary.is_some())
        };
        let places = BTreeSet::from([ends[0], ends[1], self.tokens(path)]);
        places.into_iter().filter(|at| *at > reused_tokens && !is_boundary(*at)).collect()
    }

    /// Whether the window pool could ever hold the boundary's pages beside those that the sequence sets aside. (Pages of full attention are as
    /// many with and without reuse.)
    fn fits(&self, path: &[NodeId], demand: &PageDemand) -> bool {
        let boundary = self.shape.context_pages(PageGroup::Window, self.tokens(path)).len() as u32;
        boundary + demand.window <= self.pools.group(PageGroup::Window).counts().total
    }

    fn insert(&mut self, parent: Parent, tokens: &[TokenId], page: CachedPage) -> NodeId {
        let (id, tokens, used) = (NodeId(self.next_node), Arc::<[TokenId]>::from(tokens), self.uses);
        self.next_node += 1;
        match &parent {
            Parent::Root(salt) => self.roots.entry(salt.clone()).or_default().insert(tokens.clone(), id),
            Parent::Node(parent) => {
                let node = self.node(*parent);
                let (was_leaf, used) = (node.children.is_empty(), node.used);
                let replaced = node.children.insert(tokens.clone(), id);
                if was_leaf {
                    self.leaves.remove(&(used, *parent));
                }
                replaced
            }
        };
        self.nodes.insert(id, Node { parent, tokens, page, boundary: None, children: Children::new(), used });
        self.leaves.insert((used, id));
        id
    }

    /// Sets pages aside, if need be those of others that nobody reads.
    fn reserve(&mut self, demand: PageDemand) -> Result<SequenceReserve, NoPages> {
        let wanted = [(PageGroup::Full, demand.full), (PageGroup::Window, demand.window)];
        if wanted.iter().all(|(group, num_pages)| self.has_room(*group, *num_pages)) {
            for (group, num_pages) in wanted {
                self.make_room(group, num_pages);
            }
        }
        SequenceReserve::take(&self.pools, self.shape, demand)
    }

    fn free(&self, group: PageGroup) -> u32 {
        self.pools.group(group).counts().free
    }

    fn has_room(&self, group: PageGroup, num_pages: u32) -> bool {
        let free = self.free(group);
        free >= num_pages || self.can_evict(group, (num_pages - free) as usize)
    }

    /// Lets go of pages until `num_pages` are free, or of none if that many never would be.
    fn make_room(&mut self, group: PageGroup, num_pages: u32) {
        if self.has_room(group, num_pages) {
            while self.free(group) < num_pages && self.evict(group) {}
        }
    }

    /// Whether so many pages would be free if everything unread were let go of. Looks at no more of the cache than that takes.
    fn can_evict(&self, group: PageGroup, num_pages: usize) -> bool {
        match group {
            PageGroup::Full => self.unread_from_leaves().take(num_pages).count() == num_pages,
            PageGroup::Window => {
                let mut unread = self.window_pages().filter(|page| !page.is_read()).map(CachedPage::id);
                let mut distinct = BTreeSet::new();
                while distinct.len() < num_pages && unread.next().map(|id| distinct.insert(id)).is_some() {}
                distinct.len() == num_pages
            }
        }
    }

    /// Nodes that could go one after the other: leaves that nobody reads, and who would be one when all its children are gone.
    fn unread_from_leaves(&self) -> impl Iterator<Item = NodeId> {
        let mut leaves = self.leaves.iter().map(|(_, id)| *id);
        let mut children_gone = BTreeMap::<NodeId, usize>::new();
        let mut bare = None;
        let is_unread = |id: &NodeId| !self.nodes[id].page.is_read();
        std::iter::from_fn(move || {
            let id = bare.take().or_else(|| leaves.find(is_unread))?;
            if let Parent::Node(parent) = self.nodes[&id].parent {
                let gone = children_gone.entry(parent).or_default();
                *gone += 1;
                bare = Some(parent).filter(|parent| *gone == self.nodes[parent].children.len() && is_unread(parent));
            }
            Some(id)
        })
    }

    /// Of a boundary.
    fn window_of(&self, id: NodeId) -> &[CachedPage] {
        self.nodes[&id].boundary.as_ref().map_or(&[], |boundary| &boundary.window)
    }

    /// Window pages of all boundaries; one that several share comes as often.
    fn window_pages(&self) -> impl Iterator<Item = &CachedPage> {
        self.boundaries.iter().flat_map(|(_, id)| self.window_of(*id))
    }

    /// Lets go of the least recently used leaf that nobody reads, or of the boundary worth least that has a page nobody reads. Whether there was
    /// one.
    fn evict(&mut self, group: PageGroup) -> bool {
        match group {
            PageGroup::Full => {
                let Some(id) = first(&self.leaves, |id| !self.nodes[&id].page.is_read()) else { return false };
                self.remove_leaf(id);
                self.counts.evicted_full += 1;
            }
            PageGroup::Window => {
                let is_unread = |id| self.window_of(id).iter().any(|page| !page.is_read());
                let Some(id) = first(&self.boundaries, is_unread) else { return false };
                self.remove_boundary(id);
                self.counts.evicted_boundaries += 1;
            }
        }
        true
    }

    /// Makes a node no boundary, if it is one.
    fn remove_boundary(&mut self, id: NodeId) {
        if let Some(Boundary { worth, .. }) = self.node(id).boundary.take() {
            self.boundaries.remove(&(worth, id));
        }
    }

    fn remove_leaf(&mut self, id: NodeId) {
        self.remove_boundary(id);
        let Node { parent, tokens, used, .. } = self.nodes.remove(&id).expect("the leaf was just looked at");
        self.leaves.remove(&(used, id));
        match parent {
            Parent::Root(salt) => {
                if let Some(children) = self.roots.get_mut(&salt) {
                    children.remove(&tokens);
                    if children.is_empty() {
                        self.roots.remove(&salt);
                    }
                }
            }
            Parent::Node(parent) => {
                let node = self.node(parent);
                node.children.remove(&tokens);
                if node.children.is_empty() {
                    let used = node.used;
                    self.leaves.insert((used, parent));
                }
            }
        }
    }
}

/// The first one of some kind.
fn first<K>(in_order: &BTreeSet<(K, NodeId)>, which: impl Fn(NodeId) -> bool) -> Option<NodeId> {
    in_order.iter().map(|(_, id)| *id).find(|id| which(*id))
}
