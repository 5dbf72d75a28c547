// Search from a disk. Browsers start no worker from file://; a hidden frame that runs the same script stands in for one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inside = this.frame.contentWindow;
      inside.postMessageToPage = (data) => this.answer(data);
      inside.document.open();
      inside.document.write("<script>postMessage = (data) => postMessageToPage(data)</" + "script>");
      inside.document.write(`<script src="${new URL(url, location)}"></` + "script>");
      inside.document.close();
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
    }

    answer(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
