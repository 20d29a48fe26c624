//! `events`, `published`: what routers are told of the prefix index.

use crate::error::Result;
use crate::prefix::Events;
use crate::state::Mmu;

impl Mmu {
    /// What became of published blocks from the event `since` on, as far as it is still known.
    ///
    /// An error when the manager notes no events ([`Config::events`](crate::Config::events)), or
    /// `since` is a number that no event has had yet and the next will not have.
    pub fn events(&self, since: u64) -> Result<Events> {
        self.shared().index.events(since)
    }

    /// Every published block, as events: what somebody needs who begins now, or has lost events, and
    /// goes on with [`Events::next`]. Holds the shared lock for as long as it takes to copy them.
    pub fn published(&self) -> Events {
        self.shared().index.published(&self.tokens)
    }
}
