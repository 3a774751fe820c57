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

  async #store(mode) {
    const database = await this.database;
    return database?.transaction(STORE, mode).objectStore(STORE);
  }

  /** All conversations, the latest first. */
  async all() {
    const store = await this.#store("readonly");
    const found = store ? await finished(store.getAll()) : [...this.inMemory.values()];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async put(conversation) {
    const copy = structuredClone(conversation); // it may grow while the database opens
    const store = await this.#store("readwrite");
    if (store) await finished(store.put(copy));
    else this.inMemory.set(copy.id, copy);
  }

  async remove(id) {
    const store = await this.#store("readwrite");
    if (store) await finished(store.delete(id));
    else this.inMemory.delete(id);
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

export function remember(name, value) {
  try {
    localStorage.setItem(`moebius${PLACE}:${name}`, JSON.stringify(value));
  } catch {
    // A full or forbidden storage: the value holds for this page only.
  }
}
