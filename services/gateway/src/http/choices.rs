//! Answers as choices: one event a piece, or all folded for one body.

use std::sync::Arc;

use axum::response::sse::Event;
use futures_util::Stream;
use types::RequestId;

use super::sse;
use crate::answers::{Answers, Update};
use crate::choices::{Fold, StreamWriter};
use crate::error::ApiError;
use crate::service::Service;

/// The events of a streamed response.
pub(super) fn events(
    service: Arc<Service>,
    id: RequestId,
    mut writer: impl StreamWriter,
    mut answers: Answers,
) -> impl Stream<Item = Event> {
    async_stream::stream! {
        for chunk in writer.opening() {
            yield sse::data(&chunk);
        }
        while let Some(event) = answers.next().await {
            match event {
                Ok(event) => yield sse::data(&match event.update {
                    Update::Piece(piece) => writer.piece(event.index, &piece),
                    Update::End(end) => writer.last(event.index, end.reason),
                }),
                Err(error) => {
                    service.broke_off(&id, &error);
                    yield sse::error(&error);
                    return;
                }
            }
        }
        if let Some(usage) = writer.usage(answers.cost()) {
            yield sse::data(&usage);
        }
        yield sse::done();
    }
}

/// Waits for all answers, in the order of their numbers.
///
/// # Errors
/// The first that one of them ends with.
pub(super) async fn folded<F: Fold>(service: &Service, answers: &mut Answers) -> Result<Vec<F>, ApiError> {
    let mut folded: Vec<F> = (0..answers.num_answers()).map(|_| F::default()).collect();
    while let Some(event) = answers.next().await {
        let event = event?;
        let answer = &mut folded[event.index as usize];
        match event.update {
            Update::Piece(piece) => answer.push(&piece, service.model.vocabulary()),
            Update::End(end) => answer.finish(end.reason),
        }
    }
    Ok(folded)
}
