// The message field: its text, and images chosen, dropped or pasted.

import { byId, element } from "./dom.js";

const MOST_IMAGE_BYTES = 20 * 2 ** 20;

export class Composer {
  /** `send` is called when the user wants to send; `notice` shows a sentence. */
  constructor(notice, send) {
    this.notice = notice;
    this.images = []; // data URLs of what is attached to the next message
    this.field = byId("composer");
    this.isTouch = () => matchMedia("(pointer: coarse)").matches;
    byId("composer-form").addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !this.isTouch()) {
        event.preventDefault();
        send();
      }
    });
    this.field.addEventListener("input", () => this.#fit());
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => this.#attach([...event.target.files]));
    this.field.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (files.length) this.#take(files);
    });
    this.#takeDropped();
  }

  /** Takes the focus unless another element has it. On phones it would open the keyboard, so only if `always`. */
  focus(always = false) {
    const isFree = !document.activeElement?.checkVisibility() || document.activeElement === document.body;
    if (always || (isFree && !this.isTouch())) this.field.focus({ preventScroll: true });
  }

  /** Whether there is something to send. */
  get isEmpty() {
    return !this.field.value.trim() && !this.images.length;
  }

  /** Returns the message, and empties the field. */
  take() {
    const message = { role: "user", content: this.field.value.trim(), images: this.images };
    this.field.value = "";
    this.images = [];
    this.#fit();
    this.#showImages();
    return message;
  }

  /** Sets the height to that of its text, which may wrap; the style sheet bounds it. */
  #fit() {
    const { style } = this.field;
    style.height = "auto";
    if (this.field.value) style.height = `${this.field.scrollHeight + 2}px`; // its borders
  }

  /** Attaches images that are dropped anywhere on the conversation; other files would replace the page. */
  #takeDropped() {
    const view = byId("chat-view");
    const hasFiles = (event) => event.dataTransfer.types.includes("Files");
    view.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      event.dataTransfer.dropEffect = byId("attach").hidden ? "none" : "copy";
    });
    view.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#take([...event.dataTransfer.files]);
    });
  }

  /** Attaches images among dropped or pasted files, and says why others are not attached. */
  #take(files) {
    const images = files.filter((file) => byId("file").accept.split(",").includes(file.type));
    if (byId("attach").hidden) this.notice("This model takes no images.");
    else if (images.length < files.length) this.notice("Only images can be attached: PNG, JPEG or WebP.");
    if (images.length && !byId("attach").hidden) this.#attach(images);
  }

  async #attach(files) {
    for (const file of files) {
      if (file.size > MOST_IMAGE_BYTES) {
        this.notice(`${file.name} is larger than 20 MiB.`);
        continue;
      }
      const reader = new FileReader();
      reader.readAsDataURL(file);
      await new Promise((resolve) => (reader.onloadend = resolve));
      if (reader.result) this.images.push(reader.result);
      else this.notice(`${file.name} cannot be read.`);
    }
    byId("file").value = "";
    this.#showImages();
  }

  #showImages() {
    const remove = (index) => {
      this.images.splice(index, 1);
      this.#showImages();
      this.focus(true);
    };
    byId("attachments").replaceChildren(
      ...this.images.map((url, index) =>
        element("button", { type: "button", class: "thumbnail", "aria-label": `Remove image ${index + 1}`, onclick: () => remove(index) }, element("img", { src: url, alt: "" })),
      ),
    );
  }
}
