//! What prefill and decode share: the step-loop thread, registration, tickets.
