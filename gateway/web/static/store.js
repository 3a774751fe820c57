// Conversations in this browser's database, settings in its local storage; in memory where neither is allowed.
// Two servers behind one host, below different paths, share nothing.

const PLACE = location.pathname.replace(/[^/]*$/, "");
const DATABASE = `moebius${PLACE}`;
const STORE = "conversations";

function finished(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function open() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  return finished(request);
}

export class Conversations {
  constructor() {
    this.inMemory = new Map();
    this.database = open().catch(() => null); // who is quicker than the database waits for it
  }

  /** Whether data is kept beyond the page. */
  async areKept() {
    return (await this.database) !== null;
  }

  /** Runs `action` on the object store, until its change is on disk. Raises DOMException. */
  async #change(action) {
    const transaction = (await this.database).transaction(STORE, "readwrite");
    const request = action(transaction.objectStore(STORE));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? request.error);
    });
  }

  /** All conversations, the latest first. */
  async all() {
    const database = await this.database;
    const found = database ? await finished(database.transaction(STORE).objectStore(STORE).getAll()) : [];
    const kept = found.filter((one) => !this.inMemory.has(one.id));
    return [...kept, ...this.inMemory.values()].sort((a, b) => b.updated - a.updated);
  }

  /** Returns whether the conversation is kept beyond the page; it is not if the storage is full or closed. */
  async put(conversation) {
    const copy = structuredClone(conversation); // it may grow while the database opens
    try {
      await this.#change((store) => store.put(copy));
      this.inMemory.delete(copy.id);
      return true;
    } catch {
      this.inMemory.set(copy.id, copy);
      return false;
    }
  }

  async remove(id) {
    this.inMemory.delete(id);
    if (await this.areKept()) await this.#change((store) => store.delete(id));
  }
}

/** The JSON value of a name, or `otherwise`. */
export function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`moebius${PLACE}:${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Returns whether the value is kept; in a full or closed storage it is not. */
export function remember(name, value) {
  try {
    localStorage.setItem(`moebius${PLACE}:${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
