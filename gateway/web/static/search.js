// Search in the texts of conversations.

const AROUND = 30; // characters shown before what was found
const AFTER = 60;

/** Conversations that have all words of the query, in any case and order, and where: {conversation, index, excerpt}. */
export function searchConversations(conversations, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const conversation of conversations) {
    const texts = conversation.messages.map((message) => message.content);
    const lower = [conversation.title, ...texts].map((text) => text.toLowerCase());
    if (!words.every((word) => lower.some((text) => text.includes(word)))) continue;
    const index = texts.findIndex((_, place) => words.some((word) => lower[place + 1].includes(word)));
    found.push({ conversation, index, excerpt: index < 0 ? "" : excerptOf(texts[index], lower[index + 1], words) });
  }
  return found;
}

function excerptOf(text, lower, words) {
  const places = words.map((word) => lower.indexOf(word)).filter((place) => place >= 0);
  const at = Math.min(...places);
  const from = Math.max(0, at - AROUND);
  return `${from ? "…" : ""}${text.slice(from, at + AFTER).replace(/\s+/g, " ").trim()}${at + AFTER < text.length ? "…" : ""}`;
}
