//! One suite over both places.

use chassis::Shutdown;
use serde_json::json;

use super::*;

const ROOM: u64 = 1000;

fn each_store(check: impl Fn(&dyn RecordStore)) {
    check(&MemoryStore::new(ROOM));
    let dir = tempfile::tempdir().unwrap();
    check(&FileStore::open(&dir.path().join("records.redb"), ROOM).unwrap());
}

#[test]
fn records_are_kept_until_deleted() {
    each_store(|store| {
        assert_eq!(store.get("a").unwrap(), None);
        store.put("a", 10, b"one").unwrap();
        store.put("b", 10, b"two").unwrap();
        assert_eq!(store.get("a").unwrap().as_deref(), Some(b"one".as_slice()));
        store.delete("a").unwrap();
        store.delete("a").unwrap();
        assert_eq!(store.get("a").unwrap(), None);
        assert_eq!(store.get("b").unwrap().as_deref(), Some(b"two".as_slice()));
    });
}

#[test]
fn what_has_ended_is_forgotten_and_nothing_else() {
    each_store(|store| {
        for (id, expires_at) in [("late", 30), ("early", 10), ("middle", 20)] {
            store.put(id, expires_at, b"x").unwrap();
        }
        assert_eq!(store.expire(9).unwrap(), 0);
        assert_eq!(store.expire(20).unwrap(), 2);
        let left = ["early", "middle", "late"].map(|id| store.get(id).unwrap().is_some());
        assert_eq!(left, [false, false, true]);
    });
}

#[test]
fn a_full_store_gives_up_what_ends_first() {
    each_store(|store| {
        let record = vec![7; ROOM as usize / 2];
        for (id, expires_at) in [("b", 20), ("a", 10)] {
            store.put(id, expires_at, &record).unwrap();
        }
        store.put("c", 30, &record).unwrap();
        let left = ["a", "b", "c"].map(|id| store.get(id).unwrap().is_some());
        assert_eq!(left, [false, true, true]);
        // What was given up or deleted makes room.
        store.delete("b").unwrap();
        store.put("d", 5, &record).unwrap();
        assert!(store.get("c").unwrap().is_some());
        let error = store.put("e", 40, &vec![0; ROOM as usize + 1]).unwrap_err();
        assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
        assert!(store.get("c").unwrap().is_some(), "a record that cannot fit costs no other");
    });
}

#[test]
fn a_file_outlives_its_process_and_has_one_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("records.redb");
    let store = FileStore::open(&file, ROOM).unwrap();
    store.put("a", 10, b"one").unwrap();
    let error = FileStore::open(&file, ROOM).unwrap_err();
    assert!(error.to_string().contains("records.redb"), "{error}");
    drop(store);
    let again = FileStore::open(&file, ROOM).unwrap();
    assert_eq!(again.get("a").unwrap().as_deref(), Some(b"one".as_slice()));
}

#[tokio::test]
async fn a_response_is_seen_by_its_owner_until_its_end() {
    let tasks = Tasks::new(Shutdown::new());
    let open = |keep_hours| {
        let config = ResponsesStoreConfig { file: None, keep_hours, bytes_max: 1 << 20 };
        KeptResponses::open(&tasks, &config).unwrap()
    };
    let kept = open(1);
    kept.put("alice", json!({ "id": "resp_1" }), vec![json!({ "role": "user" })]).await.unwrap();
    assert!(kept.get("bob", "resp_1").await.unwrap().is_none());
    assert!(!kept.delete("bob", "resp_1").await.unwrap());
    let found = kept.get("alice", "resp_1").await.unwrap().unwrap();
    assert_eq!((found.response, found.conversation), (json!({ "id": "resp_1" }), vec![json!({ "role": "user" })]));
    assert!(kept.delete("alice", "resp_1").await.unwrap());
    assert!(kept.get("alice", "resp_1").await.unwrap().is_none());
    // Expired, but not yet removed.
    let brief = open(0);
    brief.put("alice", json!({ "id": "resp_2" }), Vec::new()).await.unwrap();
    assert!(brief.get("alice", "resp_2").await.unwrap().is_none());
}
