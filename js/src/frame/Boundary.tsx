// Catches an exception of its children and shows its text, with a way to try again.
// Invariant: never an empty output.
import { Component, type ComponentChildren } from "preact";

interface Props {
  name: string;
  children: ComponentChildren;
}

export class Boundary extends Component<Props, { failure: string | null }> {
  override state = { failure: null as string | null };

  static override getDerivedStateFromError(error: unknown): { failure: string } {
    console.error(error);
    return { failure: error instanceof Error ? error.message : String(error) };
  }

  override render() {
    const { failure } = this.state;
    if (failure === null) return this.props.children;
    return (
      <div class="nni-failure" role="alert" data-testid="nni-error">
        <span>
          Could not draw {this.props.name}: {failure}
        </span>
        <button type="button" class="nni-button" onClick={() => this.setState({ failure: null })}>
          Try again
        </button>
      </div>
    );
  }
}
